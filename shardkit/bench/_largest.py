"""The largest batch that fits into a budget of memory, found by trying."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit import _registry
from shardkit._options import typed_options
from shardkit._prepare import resolve
from shardkit._sizes import format_bytes, parse_bytes
from shardkit._strategy import Strategy
from shardkit.bench import _budget
from shardkit.bench._planned import Planned
from shardkit.bench._search import Search
from shardkit.bench._trials import OF_THE_MACHINE, Listener, Trial, Trials
from shardkit.errors import InputError, OutOfMemoryError, TrialError

if TYPE_CHECKING:
    from shardkit.workloads import Workload


WINDOW = 4
"""Micro-batches of a step of a trial, where a global batch asks for as many or more: further ones hold nothing more."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits into a budget, and the trials that show it. Memory is in bytes, per rank.

    ``batch`` is the micro-batch of one rank, ``accumulate`` the micro-batches of a step, ``global_batch`` the samples
    of a step on all ranks. ``trials`` are in the order in which they were run; the last one that fitted with ``batch``
    is :attr:`best`, and the next larger size failed, unless ``batch`` is the largest that was to be tried, which
    ``notes`` then say. ``leak`` is by how much the memory in use grows from step to step, on the rank where it grows
    most; None if it doesn't. ``notes`` say what the figures hold for.
    """

    workload: str
    strategy: str
    memory: int
    processes: int
    device: str
    batch: int
    accumulate: int
    global_batch: int
    trials: tuple[Trial, ...]
    leak: int | None
    notes: tuple[str, ...]

    @property
    def best(self) -> Trial:
        """The trial that fitted with the largest batch."""
        return next(trial for trial in reversed(self.trials) if trial.fits and trial.batch == self.batch)

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """The most that each rank held at a time with the largest batch, above what it held before."""
        return self.best.peak

    @property
    def base_memory(self) -> tuple[int, ...]:
        """What each rank held before training, which the budget doesn't count."""
        return self.best.base

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON has."""
        trials = [dataclasses.asdict(trial) for trial in self.trials]
        more = {"peak_memory": list(self.peak_memory), "base_memory": list(self.base_memory)}
        return {**dataclasses.asdict(self), **more, "notes": list(self.notes), "trials": trials}


def find_max_batch(
    workload: str | Callable[[], Workload] | Trials,
    strategy: Strategy | str | Path,
    *,
    memory: int | str,
    processes: int = 2,
    global_batch: int | None = None,
    accumulate: int | None = None,
    device: str = "auto",
    steps: int = 4,
    timeout: float = 600,
    max_batch: int = 2**20,
    estimate: Callable[[int], float] | None = None,
    alternatives: Callable[[], str] | None = None,
    plan: bool = True,
    listener: Listener | None = None,
) -> MaxBatch:
    """Return the largest micro-batch of a rank that trains within a budget of memory: it ran, and one more failed.

    ``workload`` is a name, ``FILE.py:function``, or a function that returns a :class:`shardkit.Workload`, which is sent
    by value. In its place may stand an open :class:`Trials`, which has its own processes, device, steps and timeout.
    ``memory`` is what each rank may allocate above what it held before training, in bytes or as text such as
    ``"24GiB"``; allocations beyond it fail. Each trial is a fresh group of processes, and trains ``steps`` steps. A
    trial of which no rank ends a step within ``timeout`` seconds hangs.

    With ``global_batch`` the samples of a step on all ranks stay the same: the sizes are those that divide it, and
    ``accumulate`` makes up for them; a trial takes at most ``WINDOW`` micro-batches a step. Without, it is the
    strategy's unless given. ``estimate`` says about how many bytes a rank takes with a micro-batch, which saves trials;
    the answer doesn't depend on it. ``alternatives`` is called where nothing fits, and says what would. Both come from
    :func:`shardkit.plan` unless they are given, or ``plan`` is false. ``max_batch`` is the largest size that is tried.

    Nothing changes in this process. When it ends, however that comes about, no process and no file of it is left.

    Raises:
        OutOfMemoryError: one sample doesn't fit.
        InputError: the workload or a number is wrong, such as a workload that ignores the size.
        TrialError: a rank failed, died or hung, and not for want of memory; says whether with every batch.
    """
    strategy, budget = resolve(strategy), parse_bytes(memory)
    typed_options(_registry.describe(strategy.backend), strategy.options)
    if not isinstance(workload, Trials):
        with Trials(workload, processes=processes, device=device, steps=steps, timeout=timeout) as trials:
            return find_max_batch(
                trials,
                strategy,
                memory=budget,
                global_batch=global_batch,
                accumulate=accumulate,
                max_batch=max_batch,
                estimate=estimate,
                alternatives=alternatives,
                plan=plan,
                listener=listener,
            )
    trials = workload
    _budget.check_supported(trials.device)
    sizes = _sizes(max_batch, global_batch, accumulate, trials.processes)
    if plan:
        planned = Planned(
            trials.workload,
            strategy,
            memory=budget,
            processes=trials.processes,
            device=trials.device,
            timeout=min(trials.timeout, PLAN_SECONDS),
            listener=listener,
        )
        estimate, alternatives = estimate or planned.estimate(), alternatives or planned.alternatives
    search = Search(sizes, budget, estimate)
    ran: list[Trial] = []

    def run(batch: int) -> Trial:
        share = accumulate if global_batch is None else min(global_batch // (batch * trials.processes), WINDOW)
        trial = trials.run(strategy, batch, accumulate=share, budget=budget, listener=listener)
        if trial.outcome == "died" and 2 * trial.grown >= budget:
            # Some libraries don't look whether they got the memory that they asked for: then it trains with more.
            again = trials.run(strategy, batch, accumulate=share, budget=2 * budget, listener=listener)
            if again.outcome in ("fits", "out of memory"):
                more = f"; within {format_bytes(2 * budget)} it doesn't"
                trial = dataclasses.replace(trial, outcome="out of memory", note=trial.note + more)
        ran.append(trial)
        return trial

    while (batch := search.next()) is not None:
        trial = run(batch)
        if trial.outcome in ("error", "died", "hang"):
            raise _failure(trial, ran, run, sizes[0])
        if trial.check().fits:
            search.fitted(batch, max(trial.reserved))
        else:
            search.failed(batch)
    if search.largest is None:
        raise _nothing_fits(ran, strategy, budget, alternatives)
    best = next(trial for trial in reversed(ran) if trial.fits and trial.batch == search.largest)
    share = best.accumulate if global_batch is None else global_batch // (best.batch * trials.processes)
    leak = _leak(best)
    return MaxBatch(
        workload=trials.name,
        strategy=str(dataclasses.replace(strategy, accumulate=share)),
        memory=budget,
        processes=trials.processes,
        device=trials.device,
        batch=best.batch,
        accumulate=share,
        global_batch=best.batch * share * trials.processes,
        trials=tuple(ran),
        leak=leak,
        notes=tuple(_notes(ran, best, share, sizes, budget, leak, trials.device, global_batch)),
    )


def measure(
    workload: str | Callable[[], Workload] | Trials,
    strategy: Strategy | str | Path,
    batch: int,
    *,
    memory: int | str | None = None,
    processes: int = 2,
    accumulate: int | None = None,
    device: str = "auto",
    steps: int = 4,
    timeout: float = 600,
    listener: Listener | None = None,
) -> Trial:
    """Train ``steps`` steps with one size of micro-batch, in fresh processes, and return the memory and time it took.

    ``memory`` is a budget per rank, in bytes or as text such as ``"24GiB"``; without one there is no limit. The trial
    that is returned fits or ran out of memory. Of the peak, that with the optimizer's state and all buckets is there
    from the third step on. In the place of a workload may stand an open :class:`Trials`, which has its own processes,
    device, steps and timeout, and starts faster from the second call on.

    Raises:
        ShardkitError: the workload, the strategy or a number is wrong, or the ranks refused with this error.
        TrialError: a rank failed, died or hung, and not for want of memory.
    """
    strategy = resolve(strategy)
    budget = None if memory is None else parse_bytes(memory)
    if isinstance(workload, Trials):
        return workload.run(strategy, batch, accumulate=accumulate, budget=budget, listener=listener).check()
    with Trials(workload, processes=processes, device=device, steps=steps, timeout=timeout) as trials:
        return trials.run(strategy, batch, accumulate=accumulate, budget=budget, listener=listener).check()


PLAN_SECONDS = 120
"""What a plan may take; a search that has none takes more trials, which take longer yet."""

_LEAK = 64 * 1024
"""Bytes per step from which on growth is a leak.

What the allocator has given out after a step grew by up to 7 KiB a step in steps 2 to 6 of the built-in workloads, but
for a single jump of 41 KiB; the smallest growth of several steps counts.
"""


def _leak(trial: Trial) -> int | None:
    """Return by how many bytes the memory in use grew in each step from the second on, on the worst rank."""
    grown = []
    for told in trial.in_use:
        # The state of the optimizer and the buckets come with the first two steps. The last count is after a garbage
        # collection: what that freed was no leak.
        if len(told) > 4:
            steps = [*told[1:-2], min(told[-2:])]
            grown.append(min(later - earlier for earlier, later in itertools.pairwise(steps)))
    worst = max(grown, default=0)
    return worst if worst >= _LEAK else None


def _sizes(max_batch: int, global_batch: int | None, accumulate: int | None, processes: int) -> Sequence[int]:
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise InputError(f"max_batch is a whole number from 1 on, not {max_batch!r}")
    if global_batch is None:
        return range(1, max_batch + 1)
    if accumulate is not None:
        raise InputError("a global batch fixes accumulate for each size of batch: give one of the two")
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise InputError(f"global_batch is a whole number from 1 on, not {global_batch!r}")
    if global_batch % processes:
        raise InputError(f"a global batch of {global_batch} can't be shared by {processes} processes alike")
    own = global_batch // processes
    return [size for size in range(1, min(own, max_batch) + 1) if own % size == 0]


def _failure(trial: Trial, ran: list[Trial], run: Callable[[int], Trial], smallest: int) -> TrialError:
    """Return the error of a trial that failed for another reason than memory, with what is known of other sizes."""
    fitted = [other.batch for other in ran if other.fits]
    if not fitted and trial.batch > smallest and trial.outcome != "hang":
        other = run(smallest)
        if other.fits:
            fitted = [smallest]
        elif other.outcome == trial.outcome and other.kind == trial.kind:
            return _told(trial, f"it fails with every batch: with {smallest} too")
    if fitted:
        return _told(trial, f"it is a matter of size: batch {max(fitted)} trains")
    return _told(trial, "")


def _told(trial: Trial, more: str) -> TrialError:
    text = "\n".join(filter(None, [f"batch {trial.batch}: {trial.note}", more, trial.details]))
    return TrialError(text, trial.rank, trial.details, trial.batch)


def _nothing_fits(
    ran: list[Trial], strategy: Strategy, budget: int, alternatives: Callable[[], str] | None
) -> OutOfMemoryError:
    trial = ran[-1]
    text = (
        f"not even a batch of {trial.batch} fits into {format_bytes(budget)} per rank under {str(strategy)!r}: rank "
        f"{trial.rank}: {trial.note}"
    )
    if trial.reserved and trial.rank is not None:
        text += f", with {format_bytes(trial.reserved[trial.rank])} of the budget taken"
    if alternatives is not None:
        text += f"; {alternatives()}"
    return OutOfMemoryError(text, trial.asked)


def _notes(
    ran: list[Trial],
    best: Trial,
    share: int,
    sizes: Sequence[int],
    budget: int,
    leak: int | None,
    device: str,
    global_batch: int | None,
) -> list[str]:
    notes = []
    if best.batch == sizes[-1]:
        notes.append(
            f"{best.batch} is the largest batch that was to be tried: no more were found not to fit"
            if global_batch is None
            else f"{best.batch} is the whole of the global batch: all of it fits"
        )
    if device == "cpu":
        notes.append(
            "the ranks gave freed blocks of 128 KiB and more back to the kernel at once (glibc's M_MMAP_THRESHOLD), "
            "from one arena; left to itself glibc keeps them, and up to a third less fits, differently from run to run"
        )
    if any(trial.kind == OF_THE_MACHINE for trial in ran):
        notes.append("the kernel ended ranks that were within their budget: it is the machine's memory that ran out")
    if share > best.accumulate:
        notes.append(
            f"a step of a trial took {best.accumulate} of the {share} micro-batches: further ones hold nothing more"
        )
    if leak is not None:
        left = max(0, budget - max(best.reserved)) // leak
        notes.append(
            f"memory grows by {format_bytes(leak)} with every step, a leak: after {left} more steps than the "
            f"{len(best.step_seconds)} of a trial this batch doesn't fit any more"
        )
    return notes
