"""The session: one loop over every engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final
from zlib import crc32

import torch

from shardkit import _checkpoint
from shardkit._aside import Aside
from shardkit._checks import check_loss, settings_of
from shardkit._processes import same_everywhere
from shardkit._random import get_random_state, set_random_state
from shardkit._tripwire import Tripwire
from shardkit.errors import NonFiniteError, StateError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit._backend import Backend
    from shardkit._buffers import Buffers
    from shardkit._engine import Engine
    from shardkit._processes import Processes
    from shardkit._strategy import Strategy


_ERROR_SECONDS = 5
"""How long a rank that leaves its session by an error waits for the others to do the same, to close it together."""


@final
class Session:
    """A model and its optimizer, ready to train under a strategy. :func:`shardkit.prepare` makes it.

    Call ``model``, then ``backward`` and ``step`` for each micro-batch. Methods are collective unless they say
    otherwise: every rank calls them in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        strategy: Strategy,
        backend: Backend,
        processes: Processes,
        buffers: Buffers | None,
        signature: dict[str, Any],
        device: torch.device,
        forget: Callable[[], None],
    ) -> None:
        self.model: nn.Module = model
        self.strategy: Strategy = strategy
        self.backend: Backend = backend
        self.steps: int = 0
        """Steps that moved the weights."""
        self.skipped_steps: int = 0
        """Steps left out because a loss or gradient wasn't finite."""
        self._engine = engine
        self._processes = processes
        self._buffers = buffers
        self._signature = signature
        self._device = device
        self._forget = forget
        self._accumulate = strategy.accumulate
        self._micro = 0
        self._losses: list[float | Tensor] = []
        self._scale: Tensor | None = None
        self._grad_norm: float | None = None
        self._failed = ""
        self._closed = False
        self._guarded = _guard(engine.optimizer) if engine.optimizer is not None else {}
        self._aside = Aside(engine.model)
        self._tripwire = None if engine.whole_gradients else Tripwire(engine.model, backend.name)

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that was handed to ``prepare``; its ``param_groups`` are live under every strategy.

        What a schedule or the user writes into a group holds from the next step on. ``step``, ``zero_grad`` and the
        like are the session's.

        Raises:
            StateError: the session has none: it is one for evaluation.
        """
        if self._engine.optimizer is None:
            raise StateError("this session has no optimizer: prepare was given None, so it only evaluates")
        return self._engine.optimizer

    @property
    def rank(self) -> int:
        """This process's place among all that train together, from 0. Not collective."""
        return self._processes.rank

    @property
    def world_size(self) -> int:
        """How many processes train together. Not collective."""
        return self._processes.world_size

    @property
    def grad_norm(self) -> float:
        """The global L2 norm of the last step's averaged gradient before clipping, equal on all ranks. Not collective.

        Raises:
            StateError: the strategy asks neither for clipping nor for the norm, or there was no step yet.
        """
        if self._grad_norm is None:
            if self.strategy.max_grad_norm is None and not self.strategy.track_grad_norm:
                raise StateError("the gradient norm isn't computed: ask for it with Strategy(track_grad_norm=True)")
            raise StateError("there is no gradient norm before the first step")
        return self._grad_norm

    def backward(self, loss: Tensor) -> None:
        """Back-propagate one micro-batch.

        ``loss`` is the mean over this rank's micro-batch, a scalar; it isn't rescaled. The gradients of a window of
        ``strategy.accumulate`` calls are averaged over calls and ranks.

        Raises:
            InputError: the loss is no scalar or has no gradient.
            StateError: the window is complete and waits for ``step``.
        """
        self._require_open()
        if self._micro == self._accumulate:
            raise StateError(
                f"backward past the window: {self._accumulate} of {self._accumulate} micro-batches are in; "
                "call session.step() after each session.backward(loss)"
            )
        check_loss(loss)
        if loss.dim() > 0:
            loss = loss.reshape(())
        # On CPU nothing waits for the number, and it is quicker to have than another tensor.
        value = loss.item() if loss.is_cpu else loss.detach()
        scale = self._scale
        if scale is None or scale.dtype is not loss.dtype or scale.device != loss.device:
            scale = self._scale = torch.tensor(1 / self._accumulate, dtype=loss.dtype, device=loss.device)
        last = self._micro + 1 == self._accumulate
        self._losses.append(value)
        # 0 x loss: one that isn't finite makes every gradient NaN, so that all ranks see it without a collective.
        gradient = scale if isinstance(value, float) and isfinite(value) else scale + 0 * value
        aside = self._aside.take()
        try:
            self._engine.backward(loss, gradient, last=last)
        except BaseException as error:
            self._failed = f"backward failed with {type(error).__name__}, and left part of a gradient behind"
            raise
        finally:
            if aside is not None:
                self._aside.give_back(aside)
        self._micro += 1
        if last and self._tripwire is not None:
            self._tripwire.arm()

    def step(self) -> bool:
        """Update the weights if the window is complete, and return whether they moved.

        In mid-window it does nothing and returns False.

        Raises:
            StateError: there was no ``backward`` since the last step.
            MismatchError: the optimizer's groups have other settings on another rank; nothing moved.
            NonFiniteError: a loss or gradient of any rank isn't finite, on every rank; nothing moved. With
                ``on_nonfinite="skip"`` the step is left out and returns False instead.
        """
        self._require_open()
        if self._micro < self._accumulate:
            if self._micro == 0:
                raise StateError("step without backward: call session.backward(loss) first")
            return False
        self._require_equal_settings()
        self._disarm()
        try:
            update = self._engine.step()
        except BaseException as error:
            self._failed = f"a step failed with {type(error).__name__}"
            raise
        self._micro = 0
        self._grad_norm = update.grad_norm
        if self._buffers is not None:
            self._buffers.synchronize()
        if not update.applied:
            self._say_nonfinite()
            return False
        self._losses.clear()
        self.steps += 1
        # Schedules of torch warn unless the optimizer's own step has run, and here the backend's may have.
        self._engine.optimizer._opt_called = True  # type: ignore[union-attr]
        return True

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
        if self._micro < self._accumulate:
            raise StateError(
                f"gradients are whole between the window's last backward and step: {self._micro} of "
                f"{self._accumulate} micro-batches are in"
            )
        self._processes.meet("full_gradients")
        armed = self._disarm()
        try:
            return self._engine.full_gradients()
        finally:
            if armed and self._tripwire is not None:
                self._tripwire.arm()

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
        training = {part: part.training for part in self.model.modules()}
        self.model.eval()
        try:
            with self._engine.gathered(), torch.no_grad():
                yield self.model
        finally:
            for part, mode in training.items():
                part.training = mode

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint into a directory, to go on from exactly here with the same strategy and world size.

        It holds weights, buffers, optimizer state and settings, counters and each rank's random state. A checkpoint
        that is there already is replaced in one step once all ranks are done; until then it stays whole.

        Raises:
            StateError: the call isn't made on all ranks within 30 s, or comes in mid-window.
            CheckpointError: the directory can't be written.
        """
        self._require_between_windows("save")
        _checkpoint.save(Path(directory), self._state(), self.strategy, self._processes)

    def load(self, directory: str | Path) -> None:
        """Take back what :meth:`save` wrote; gradients of a window in progress are dropped.

        Raises:
            StateError: the call isn't made on all ranks within 30 s.
            CheckpointError: there is no whole checkpoint, or it is of another strategy, world size or model; the
                session is then as it was.
        """
        self._require_usable()
        state = _checkpoint.load(Path(directory), self.strategy, self._processes, self._signature)
        self._disarm()
        self._engine.load_state_dict(state["engine"])
        groups = self.optimizer.param_groups if self._engine.optimizer is not None else []
        for group, saved in zip(groups, state["groups"], strict=True):
            group.update(saved)
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        self._micro, self._failed, self._grad_norm = 0, "", state["grad_norm"]
        self._losses.clear()
        set_random_state(state["random"], self._device)

    def close(self) -> None:
        """End the session: the module is the user's again, with whole weights, and can be prepared anew.

        The process group is destroyed if shardkit made it and no other session uses it.

        Raises:
            StateError: the call isn't made on all ranks within 30 s; the session stays open.
        """
        if self._closed:
            return
        self._processes.meet("close")
        self._closed = True
        self._disarm()
        try:
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

    def _disarm(self) -> bool:
        return self._tripwire is not None and self._tripwire.disarm()

    def _release(self) -> None:
        self._disarm()
        self._aside.close()
        for name, own in self._guarded.items():
            self.optimizer.__dict__.pop(name, None)
            if own is not None:
                self.optimizer.__dict__[name] = own
        self._processes.close()

    def _state(self) -> dict[str, Any]:
        groups = self._engine.optimizer.param_groups if self._engine.optimizer is not None else []
        return {
            "engine": self._engine.state_dict(),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "signature": self._signature,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "grad_norm": self._grad_norm,
            "random": get_random_state(self._device),
        }

    def _require_usable(self) -> None:
        if self._closed:
            raise StateError("this session is closed: prepare the model again")

    def _require_open(self) -> None:
        self._require_usable()
        if self._failed:
            raise StateError(f"{self._failed}: go on from a checkpoint with session.load, or prepare the model again")

    def _require_equal_settings(self) -> None:
        """Raise unless all ranks have the same settings in the optimizer's groups, such as the learning rate."""
        if self.world_size == 1:
            return
        settings = [settings_of(group) for group in self.optimizer.param_groups]
        if not self._processes.all_equal(crc32(repr(settings).encode())):
            facts = {f"settings of group {index} of the optimizer": group for index, group in enumerate(settings)}
            same_everywhere(self._processes.agree(facts))

    def _require_between_windows(self, what: str) -> None:
        self._require_open()
        if self._micro:
            raise StateError(
                f"{what} in mid-window would lose the gradients of {self._micro} of {self._accumulate} micro-batches: "
                f"call it after session.step() has returned True"
            )

    def _say_nonfinite(self) -> None:
        self.skipped_steps += 1
        local = [f"{float(value)}" for value in self._losses]
        self._losses.clear()
        finite = all(torch.isfinite(torch.tensor(float(value))) for value in local)
        ranks = self._processes.agree(None if finite else ", ".join(local))
        losses = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(ranks) if text is not None)
        cause = f"a loss is not finite ({losses})" if losses else "the losses are finite, but a gradient is not"
        message = (
            f"step {self.steps + self.skipped_steps} under {self.backend.name!r} was left out on every rank: {cause}; "
            "weights and optimizer are as before it"
        )
        if self.strategy.on_nonfinite == "raise":
            raise NonFiniteError(message + '. Strategy(on_nonfinite="skip") goes on instead')
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _guard(optimizer: Optimizer) -> dict[str, Any]:
    """Refuse those calls on the optimizer that are the session's, whose effect would differ among backends.

    Returns what the instance had of its own under these names, such as a ``step`` that a schedule wrapped.
    """
    refused = {
        "step": "session.step() updates the weights",
        "zero_grad": "session.step() drops the gradients",
        "add_param_group": "close the session, add the group, and prepare again",
        "state_dict": "session.save(directory) writes the optimizer's state under every strategy",
        "load_state_dict": "session.load(directory) reads the optimizer's state under every strategy",
    }

    def refusal(name: str, instead: str) -> MethodType:
        def refuse(optimizer: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
            raise StateError(f"optimizer.{name} is the session's while it is open: {instead}")

        # As a schedule marks the step that it has wrapped: it need not wrap this one, nor miss its own mark.
        refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return MethodType(refuse, optimizer)

    own = {name: optimizer.__dict__.get(name) for name in refused}
    optimizer.__dict__.update({name: refusal(name, instead) for name, instead in refused.items()})
    return own
