"""The session: one loop over every engine, and what its user does between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch

from shardkit._evaluation import evaluating
from shardkit._guard import unguard
from shardkit._loop import Loop
from shardkit._processes import joined
from shardkit._tripwire import disarm, disarmed
from shardkit._windows import moved
from shardkit.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor, nn


_ERROR_SECONDS = 5
"""How long a rank that leaves its session by an error waits for the others to do the same, to close it together."""


@final
class Session(Loop):
    """A model and its optimizer, ready to train under a strategy. :func:`shardkit.prepare` makes it.

    Call ``model``, then ``backward`` and ``step`` for each micro-batch. Methods are collective unless they say
    otherwise: every rank calls them in the same order.
    """

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks joined along the first dimension, in order of rank, on every rank.

        Each rank's may have another length, 0 too, so that none need be padded. They travel through host memory.

        Raises:
            InputError: it is no tensor of at least one dimension, or the ranks' have different types or widths.
            StateError: the call isn't made on all ranks within 30 s.
        """
        self._require_usable()
        self._processes.meet("gather")
        return joined(values, self._processes)

    def full_weights(self) -> dict[str, Tensor]:
        """Return the unsharded weights and buffers, by the names of the module's ``state_dict``, on CPU, on every rank.

        The tensors are copies. Peak extra memory is one full copy of the model.
        """
        self._require_open()
        self._processes.meet("full_weights")
        return self._engine.full_weights()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the window's averaged gradients before clipping, by parameter name, on CPU, on every rank.

        For use between the window's last ``backward`` and ``step``. Parameters without a gradient are left out. Peak
        extra memory is one full copy of the gradients. ``parameter.grad`` itself holds what the backend leaves there,
        which may be nothing.

        Raises:
            StateError: the window isn't complete.
        """
        self._require_open()
        count = self._count
        if count.micro < count.expected:
            raise StateError(
                f"gradients are whole between the window's last backward and step: {count.micro} of "
                f"{count.expected} micro-batches are in"
            )
        if count.micro < count.passes:
            self._fill_up()
        self._processes.meet("full_gradients")
        with disarmed(self._tripwire):
            return self._engine.full_gradients()

    @contextmanager
    def evaluate(self) -> Iterator[nn.Module]:
        """Return a context for evaluation that gives the module: in eval mode, without gradients, with whole weights.

        Within it ranks may call the module, or its ``generate``, a different number of times: no call communicates.
        Under a strategy that shards parameters they are gathered for the time of the context, one full copy on each
        rank; to evaluate in the shards' memory, call ``model`` the same number of times on every rank instead.
        Training modes return as they were.
        """
        self._require_open()
        self._processes.meet("evaluate")
        with evaluating(self.model), self._engine.gathered(), torch.no_grad():
            yield self.model

    def save(
        self,
        directory: str | Path,
        *,
        objects: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        keep: int | None = 1,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint into a directory, to go on from exactly here, under any strategy with any number of ranks.

        It holds weights, buffers, optimizer state and settings, counters, the place of :meth:`windows` and each rank's
        random state. ``objects`` are others to be brought back, by name, such as schedules: they have ``state_dict``
        and ``load_state_dict``. ``state`` is a mapping of the user's own, of numbers, strings, tensors and containers
        of them. The checkpoint becomes visible in one step once all ranks are done, as ``step-<steps>``; of all in the
        directory the last ``keep`` stay. With ``wait=False`` training goes on after a copy to host memory, of what this
        rank writes; an error of the writing is raised by the next ``save``, ``load`` or ``close``.

        Returns the checkpoint's path.

        Raises:
            StateError: the call isn't made on all ranks within 30 s, or comes in mid-window, or another job saves to
                the directory.
            InputError: an argument is wrong.
            MismatchError: the ranks were given different arguments.
            CheckpointError: the directory can't be written, or something can't be held; what was there is as it was.
        """
        self._require_between_windows("save")
        counters = {
            "step": self.steps,
            "skipped_steps": self.skipped_steps,
            "grad_norm": None if self._grad_norm is None else str(self._grad_norm),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        windows = self._progress if self._windows is None else self._windows.state_dict()
        return self._keeper.save(directory, counters, windows, objects, state, keep=keep, wait=wait)

    def load(
        self,
        directory: str | Path,
        *,
        objects: Mapping[str, Any] | None = None,
        position: bool = True,
        missing_ok: bool = False,
    ) -> dict[str, Any] | None:
        """Take back what :meth:`save` wrote, from a checkpoint or the last one in a directory.

        Gradients of a window in progress are dropped. ``objects`` are those that ``save`` was given, which get their
        state back. Without ``position`` the next pass over the windows begins anew. With ``missing_ok``, a directory
        without a checkpoint is no error.

        Returns the ``state`` that ``save`` was given, its tensors on the CPU; None if there was no checkpoint.

        Raises:
            StateError: the call isn't made on all ranks within 30 s.
            MismatchError: the ranks were given different arguments.
            DamageError: a file isn't what was written; the session is as it was.
            CheckpointError: there is no checkpoint, or it doesn't fit the session, which is then as it was.
        """
        self._require_usable()
        found = self._keeper.load(directory, objects, self._begin_load, missing_ok=missing_ok, position=position)
        if found is None:
            return None
        counters = found.manifest
        self.steps, self.skipped_steps = counters["step"], counters["skipped_steps"]
        self._failed = ""
        self._grad_norm = None if counters["grad_norm"] is None else float(counters["grad_norm"])
        self._count.restart()
        self._overflowed = False
        self._losses.clear()
        if self.scaler is not None and counters["scaler"] is not None:
            self.scaler.load_state_dict(counters["scaler"])
            self._engine.loss_scale = self.scaler.scale
        self._count.windows = None
        self._progress = moved(found.windows, self.rank, self.world_size) if position else None
        if self._windows is not None and self._progress is not None:
            self._windows.load_state_dict(self._progress)
        self._loads.forget()
        return found.state

    def export(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the weights into a directory of their own, as other programs read them: ``model.safetensors``.

        For a model of the transformers library ``from_pretrained`` loads the directory; other models take the file by
        ``safetensors.torch.load_model``. Each rank writes what it holds. Of tied tensors one is written, and where the
        backend trains in half precision, the weights in full. With ``dtype``, such as ``torch.bfloat16``, what is of
        floating point is written in it. An export that is there already is replaced.

        Raises:
            StateError: the call isn't made on all ranks within 30 s.
            InputError: the dtype is none of floating point, or the model has adapters.
            CheckpointError: the directory isn't empty and holds no export, or can't be written.
        """
        self._require_open()
        self._keeper.export(directory, dtype)

    def catch(self, *signals: int) -> None:
        """Have signals such as ``signal.SIGTERM`` end nothing: :attr:`interrupted` tells of them after the next step.

        Until ``close``, in the main thread. Not collective: it is enough that one rank gets the signal.

        Raises:
            InputError: a signal can't be caught, or this isn't the main thread.
        """
        self._alike.catch(signals)

    @property
    def interrupted(self) -> bool:
        """Whether a signal that :meth:`catch` caught had come to any rank before the last whole step, the same on all.

        Save then, and leave the loop. Not collective.
        """
        return self._alike.interrupted

    def close(self) -> None:
        """End the session: the module is the user's again, with whole weights, and can be prepared anew.

        The process group is destroyed if shardkit made it and no other session uses it.

        Raises:
            StateError: the call isn't made on all ranks within 30 s; the session stays open.
            CheckpointError: a save in the background failed; the session is closed.
        """
        if self._closed:
            return
        self._processes.meet("close")
        self._closed = True
        disarm(self._tripwire)
        try:
            try:
                self._keeper.finish()
            finally:
                self._engine.close()
                self._forget()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            # If the error came to all ranks, the module can be given back whole.
            self._processes.meet("close", _ERROR_SECONDS)
            self.close()
        except Exception:
            # Other ranks aren't here: nothing collective, so that they meet a closed connection and no silence.
            if not self._closed:
                self._closed = True
                self._release()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a session can't be copied or pickled: session.save(directory) writes it, and session.full_weights() gives "
            "the weights for a fresh module"
        )

    def __repr__(self) -> str:
        return f"<shardkit.Session of {type(self.model).__name__} on {self.strategy}, {self.steps} steps>"

    def _release(self) -> None:
        disarm(self._tripwire)
        self._aside.close()
        self._loads.close()
        self._alike.close()
        if self._engine.optimizer is not None:
            unguard(self._engine.optimizer, self._guarded)
        self._keeper.close()
        self._processes.close()

    def _begin_load(self) -> None:
        disarm(self._tripwire)
        self._failed = "a load failed in its midst"
