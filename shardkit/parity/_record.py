"""Record a session: whatever its loop does, step by step, into a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
import xxhash
from torch import Tensor

from shardkit._tripwire import disarmed
from shardkit.checkpoints._layout import memory_of
from shardkit.errors import InputError, StateError, TraceError
from shardkit.parity._batch import fingerprint
from shardkit.parity._facts import facts_of
from shardkit.parity._shares import Shares
from shardkit.parity._sketch import ABSENT, WIDTH
from shardkit.parity._trace import Trace

if TYPE_CHECKING:
    from shardkit._session import Session

_ERROR_SECONDS = 5
"""How long a rank whose loop ends by an error waits for the others to do the same, to write what all have seen."""

_CHUNK = 2**22
"""How many numbers of a rank travel at once, when the recording is put together."""


@contextmanager
def record(
    session: Session, path: str | Path | None, *, detail: Literal["losses", "sketch", "whole"] = "sketch"
) -> Iterator[Recording]:
    """Record what the session does within the context, into the file ``path``. Collective, and so is its end.

    Per step: losses, learning rates, whether it was applied, fingerprints of the batches, and of each parameter the
    averaged gradient and the weight, as norm and sketch; with ``detail="whole"`` the gradients themselves too, which
    takes the memory of one model a step on rank 0; with ``"losses"`` nothing of single parameters, and nothing that
    could hide a race. Beside it what the run was, and the weights at the end. Rank 0 writes the file at the end of the
    context, whole or not at all; an error of the loop goes through, and the steps before it are kept. With ``path``
    None nothing is written, and rank 0 has :attr:`Recording.trace`.

    Raises:
        InputError: ``detail`` is none of the three.
        StateError: the session only evaluates, is closed, in mid-window, or recorded already.
        TraceError: no step was taken, or the file can't be written.
    """
    recording = Recording(session, path, detail)
    try:
        yield recording
    except BaseException as error:
        recording._abandon(error)
        raise
    recording.finish()


class _Step(NamedTuple):
    losses: list[float]
    batches: list[int]
    rates: list[float]
    applied: bool
    seconds: float


@final
class Recording:
    """A recording in progress; :func:`record` makes it."""

    trace: Trace | None = None
    """What was recorded: on rank 0, once it has ended."""
    progress: Callable[[], None] | None = None
    """Called after each step."""

    def __init__(self, session: Session, path: str | Path | None, detail: str) -> None:
        if detail not in ("losses", "sketch", "whole"):
            raise InputError(f'detail is "losses", "sketch" or "whole", not {detail!r}')
        session._require_between_windows("record")
        if "step" in vars(session):
            raise StateError("this session is recorded already: end that recording first")
        optimizer = session.optimizer
        session._processes.meet("record")
        self._session = session
        self._path = path
        self._sketches = detail != "losses"
        self._whole_gradients = detail == "whole"
        self._steps: list[_Step] = []
        self._batches: list[int] = []
        self._told = False
        self._gradients: list[Tensor] = []
        self._kept: list[dict[str, Tensor]] = []
        self._numbers: dict[str, float] = {}
        self._shapes = dict(session._keeper.shapes)
        self._names = list(self._shapes)
        self._shares = Shares(session, self._shapes)
        self._groups = optimizer.param_groups
        self._nothing = _absent()
        self._facts = facts_of(session, self._shapes)
        self._facts["detail"] = detail
        # Before the first step, and at the end, nothing can be hidden.
        self._weights = [self._stacked(self._shares.weights())]
        self._hook = session.model.register_forward_pre_hook(self._seen, with_kwargs=True)
        self._step, self._close = session.step, session.close
        # On the instance, so that a session that isn't recorded has nothing of this on its step's path.
        session.step = self._recorded_step  # type: ignore[method-assign]
        session.close = self._recorded_close  # type: ignore[method-assign]
        self._open = True
        self._own_seconds = 0.0
        self._since = time.perf_counter()

    def batch(self, batch: Any) -> None:
        """Take note of a micro-batch, in place of what the module is called with: targets and all. Not collective."""
        if not self._told:
            self._batches.clear()
        self._told = True
        start = time.perf_counter()
        self._batches.append(fingerprint(batch))
        self._own_seconds += time.perf_counter() - start

    def add(self, name: str, value: float) -> None:
        """Keep a number of this rank's under a name, for ``facts["per_rank"]``. On all ranks; not collective."""
        self._numbers[name] = value

    @property
    def step_seconds(self) -> list[float]:
        """The seconds that each step took on this rank, the recording's own left out."""
        return [step.seconds for step in self._steps]

    def finish(self) -> None:
        """End the recording before its context does, such as before the session is closed. Collective."""
        if not self._open:
            return
        self._end()
        if not self._steps:
            raise TraceError("no step was recorded: call session.step() within the recording's context")
        self._session._processes.meet("the end of the recording")
        if not self._sketches:
            self._weights[-1] = self._stacked(self._shares.weights())
        weights = self._session.full_weights()
        self._write(self._joined(), weights)

    def _abandon(self, error: BaseException) -> None:
        """Keep what was seen before an error: of all ranks if they all come here, of rank 0 alone if not."""
        if not self._open:
            return
        self._end()
        if not self._steps:
            return
        self._facts["ended"] = f"{type(error).__name__}: {error}"[:1000]
        processes = self._session._processes
        try:
            processes.meet("the end of the recording", _ERROR_SECONDS)
            self._write(self._joined(), {})
        except Exception:
            if processes.rank == 0:
                self._facts["recorded_ranks"] = [0]
                self._write(self._alone(), {})

    def _end(self) -> None:
        self._open = False
        self._hook.remove()
        del self._session.step, self._session.close

    def _recorded_close(self) -> None:
        self.finish()
        self._session.close()

    def _seen(self, module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._told and module.training and torch.is_grad_enabled():
            start = time.perf_counter()
            self._batches.append(fingerprint([inputs, keywords]))
            self._own_seconds += time.perf_counter() - start

    def _recorded_step(self) -> bool:
        session, count = self._session, self._session._count
        if count.micro == 0 or count.micro < count.expected:
            return self._step()
        start = time.perf_counter()
        losses = [float(value) for value in session._losses]
        rates = [float(group["lr"]) for group in self._groups]
        self._gradients.append(self._sketched_gradients())
        own = time.perf_counter() - start
        applied = False
        try:
            applied = self._step()
        finally:
            end = time.perf_counter()
            seconds = end - self._since - own - self._own_seconds
            self._own_seconds, self._told = 0.0, False
            self._steps.append(_Step(losses, self._batches, rates, applied, seconds))
            self._batches = []
            if session._failed:
                self._weights.append(self._weights[-1])
            else:
                self._weights.append(self._sketched_weights())
            if self.progress is not None:
                self.progress()
            self._since = time.perf_counter()
        return applied

    def _sketched_gradients(self) -> Tensor:
        """Return the sketches of the gradients, ``(P, WIDTH)``, or where they aren't whole of this rank's part."""
        if not self._sketches:
            return self._stacked({})
        session = self._session
        if self._whole_gradients:
            whole = session.full_gradients()
            if session.rank == 0:
                self._kept.append(whole)
        elif session._count.micro < session._count.passes:
            session._fill_up()
        with disarmed(session._tripwire):
            rows = self._shares.gradients()
        return self._stacked(rows)

    def _sketched_weights(self) -> Tensor:
        return self._stacked(self._shares.weights() if self._sketches else {})

    def _stacked(self, rows: dict[str, Tensor]) -> Tensor:
        nothing = self._nothing
        return torch.stack([rows.get(name, nothing) for name in self._names])

    def _joined(self) -> Trace | None:
        """Put the ranks' recordings together, on rank 0. Collective."""
        session = self._session
        processes = session._processes
        told = processes.agree(self._steps)
        numbers = processes.agree(self._numbers)
        self._facts["per_rank"] = {name: [rank.get(name) for rank in numbers] for name in numbers[0]}
        weights = self._merged(torch.stack(self._weights))
        weights = _added_up(weights, self._shares.apart)
        gradients = self._merged(torch.stack(self._gradients))
        if not session._engine.whole_gradients:
            gradients = _added_up(gradients, list(range(len(self._names))))
        return self._trace(told, gradients, weights) if session.rank == 0 else None

    def _alone(self) -> Trace:
        weights = torch.stack(self._weights).unsqueeze(1)
        weights[:, :, self._shares.apart] = _absent()
        gradients = torch.stack(self._gradients).unsqueeze(1)
        if not self._session._engine.whole_gradients:
            gradients[:] = _absent()
        return self._trace([self._steps], gradients, weights)

    def _merged(self, own: Tensor) -> Tensor:
        """Return every rank's ``(S, P, WIDTH)`` as ``(S, R, P, WIDTH)``, or one for all where they hold the same."""
        processes = self._session._processes
        digest = xxhash.xxh3_64_intdigest(memory_of(own)) >> 1 if own.numel() else 0
        if processes.all_equal(digest) and not self._shares.parts:
            return own.unsqueeze(1)
        rows = max(1, _CHUNK // max(1, own[0].numel()))
        parts = [torch.stack(processes.agree(part), 1) for part in own.split(rows)]
        return torch.cat(parts)

    def _trace(self, told: list[list[_Step]], gradients: Tensor, weights: Tensor) -> Trace:
        steps = range(len(self._steps))
        first = told[0]
        whole = {}
        if self._whole_gradients:
            for name, shape in self._shapes.items():
                nothing = torch.full(shape, torch.nan)
                whole[name] = torch.stack([kept.get(name, nothing) for kept in self._kept])
        return Trace(
            self._facts,
            losses=_padded([[rank[step].losses for rank in told] for step in steps], torch.nan, torch.float64),
            batches=_padded([[rank[step].batches for rank in told] for step in steps], 0, torch.int64),
            rates=torch.tensor([step.rates for step in first], dtype=torch.float64),
            applied=torch.tensor([step.applied for step in first]),
            seconds=torch.tensor([[rank[step].seconds for rank in told] for step in steps], dtype=torch.float64),
            gradients=gradients,
            weights=weights,
            whole_gradients=whole,
        )

    def _write(self, trace: Trace | None, weights: dict[str, Tensor]) -> None:
        error = None
        if trace is not None:
            trace.final_weights.update(weights)
            self.trace = trace
            if self._path is not None:
                try:
                    trace.save(self._path)
                except TraceError as failure:
                    error = failure
        if "ended" not in self._facts:
            self._session._processes.agree(None, error)


def _absent() -> Tensor:
    row = torch.zeros(WIDTH, dtype=torch.float64)
    row[0] = ABSENT
    return row


def _added_up(values: Tensor, apart: list[int]) -> Tensor:
    """Return sketches by rank, of which those of some parameters are of parts: each the sum of them, on every rank."""
    if apart:
        parts = values[:, :, apart]
        there = parts[..., :1] != ABSENT
        total = torch.where(there, parts, 0.0).sum(1, keepdim=True)
        values[:, :, apart] = torch.where(there.any(1, keepdim=True), total, _absent())
    same = all(values[:, 0].equal(values[:, rank]) for rank in range(1, values.shape[1]))
    return values[:, :1] if same else values


def _padded(values: list[list[list[Any]]], filler: float, dtype: torch.dtype) -> Tensor:
    """Return a nest of lists, the innermost of different lengths, as one tensor."""
    width = max((len(row) for step in values for row in step), default=0)
    return torch.tensor([[row + [filler] * (width - len(row)) for row in step] for step in values], dtype=dtype)
