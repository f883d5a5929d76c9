"""The table: every strategy's largest batch, speed and memory, relative to plain data parallelism."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from shardkit._sizes import parse_bytes
from shardkit.bench import _machine
from shardkit.bench._arms import Arm, arms
from shardkit.bench._largest import PLAN_SECONDS, find_max_batch
from shardkit.bench._planned import Planned
from shardkit.bench._results import Bench, Row, Spread
from shardkit.bench._trials import Listener, Trial, Trials
from shardkit.errors import InputError, OutOfMemoryError, ShardkitError, TrialError
from shardkit.planner._make import plan
from shardkit.tools.listing import versions

if TYPE_CHECKING:
    from shardkit.workloads import Workload

WARM_UP_STEPS = 2
"""Steps of a timed run that don't count: the first allocate buffers and optimizer states."""


class Watcher:
    """What a caller hears while a benchmark runs; this one ignores it."""

    def plan(self, parts: int) -> None:
        """So many parts are to come, searches and timed runs."""

    def begin(self, what: str) -> None:
        """A part starts."""

    def progress(self, done: int, of: int, what: str) -> None:
        """The part has done so many of all its steps, or of those of its present trial."""

    def end(self, what: str) -> None:
        """The part is over; ``what`` came of it."""


def bench(
    workload: str | Callable[[], Workload],
    strategies: Sequence[str] = (),
    *,
    memory: int | str | None = None,
    batch: int | None = None,
    precisions: Sequence[str] = (),
    baseline: str | None = None,
    processes: int = 2,
    accumulate: int = 1,
    items: int = 2048,
    evaluation_items: int = 512,
    steps: int = 8,
    repeats: int = 3,
    device: str = "auto",
    timeout: float = 600,
    watcher: Watcher | None = None,
) -> Bench:
    """Measure the workload under each strategy, or under every variant of every backend, in each precision.

    The batch is the largest that fits into ``memory`` per rank, such as ``"24GiB"``, or ``batch`` for all. Without
    ``precisions`` each trains in its own, fp32 unless its text says otherwise. The first row is the ``baseline``: the
    first variant that shards nothing, in fp32, unless said otherwise. Training is timed for ``steps`` steps in each of
    ``repeats`` rounds; times for ``items`` samples of training, and ``evaluation_items`` of evaluation, are computed
    from that; 0 leaves the evaluation out. ``timeout`` is the seconds after which a trial that comes no further is
    given up.

    In each round every arm trains in fresh processes, one arm after another, and the baseline twice. A row that fails
    says so, and the rest goes on.

    Raises:
        ShardkitError: the workload, a number or the text of a strategy is wrong, or the baseline refuses the workload.
    """
    counts = {"items": items, "steps": steps, "repeats": repeats, "accumulate": accumulate}
    for name, count in counts.items():
        _check_count(name, count, 1)
    _check_count("evaluation items", evaluation_items, 0)
    if (memory is None) == (batch is None):
        raise InputError("say how much memory a rank may take, such as '24GiB', or else the batch of a rank")
    if batch is not None:
        _check_count("batch", batch, 1)
    budget = None if memory is None else parse_bytes(memory)
    with Trials(workload, processes=processes, device=device, steps=4, timeout=timeout) as trials:
        asked = _Asked(trials, batch, budget, accumulate, items, evaluation_items, steps, repeats, watcher or Watcher())
        found = [_Measured(arm) for arm in arms(strategies, precisions, baseline, accumulate, trials.device)]
        _run(asked, found)
    return Bench(
        settings=asked.settings(),
        versions=versions(),
        hardware=_machine.hardware(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command="",
        rows=tuple(_row(asked, one, found[0]) for one in found),
        noise=tuple(runs[1] / runs[0] for runs in found[0].speeds.values() if len(runs) == 2),
    )


def _check_count(name: str, count: Any, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InputError(f"{name} is a whole number from {least} on, not {count!r}")


@dataclass(frozen=True)
class _Asked:
    trials: Trials
    batch: int | None
    budget: int | None
    accumulate: int
    items: int
    evaluation_items: int
    steps: int
    repeats: int
    watcher: Watcher

    def settings(self) -> dict[str, Any]:
        from shardkit.bench._evaluation import LARGEST_GENERATED, LOSS_BATCHES

        return {
            "workload": self.trials.name,
            "device": self.trials.device,
            "processes": self.trials.processes,
            "memory": self.budget,
            "batch": self.batch,
            "accumulate": self.accumulate,
            "items": self.items,
            "evaluation_items": self.evaluation_items,
            "steps": self.steps,
            "warm_up_steps": WARM_UP_STEPS,
            "repeats": self.repeats,
            "evaluated_batches": {"loss": LOSS_BATCHES, "generated": 1, "largest_generated": LARGEST_GENERATED},
        }


@final
@dataclass
class _Measured:
    """An arm, and what was timed of it. ``speeds`` are the samples per second of the runs of each round."""

    arm: Arm
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Samples per second, over all ranks."""
    tokens: int | None = None
    speeds: dict[int, list[float]] = field(default_factory=dict)

    def tell(self, **what: Any) -> None:
        """Put something into the row."""
        self.arm.row = replace(self.arm.row, **what)


def _run(asked: _Asked, found: list[_Measured]) -> None:
    """Find the batch of each arm, then time all that have one, round after round."""
    live = [one for one in found if one.arm.open]
    asked.watcher.plan(len(live) + asked.repeats * (len(live) + 1))
    estimates = _estimates(asked, live)
    for place, one in enumerate(live):
        start = time.monotonic()
        asked.watcher.begin(one.arm.row.name)
        _find_batch(asked, one, estimates.get(place), baseline=one is found[0])
        row = one.arm.row
        one.tell(seconds=time.monotonic() - start)
        asked.watcher.end(f"{row.name}: {f'batch {row.batch}' if one.arm.open else _told(row)}")
    for turn in range(asked.repeats):
        # There and back, so that a machine that gets slower through a round favours none.
        others = [one for one in found[1:] if one.arm.open]
        for one in (found[0], *(others if turn % 2 == 0 else reversed(others)), found[0]):
            if one.arm.open:
                start = time.monotonic()
                what = f"{one.arm.row.name}, round {turn + 1} of {asked.repeats}"
                asked.watcher.begin(what)
                _time(asked, one, turn)
                one.tell(seconds=one.arm.row.seconds + time.monotonic() - start)
                asked.watcher.end(f"{what}: {_speed(one, turn) if one.arm.open else _told(one.arm.row)}")


def _speed(one: _Measured, turn: int) -> str:
    return f"{one.speeds[turn][-1]:.4g} samples/s"


def _told(row: Row) -> str:
    """Return in a line why a row has no numbers."""
    return row.outcome if row.status == "out of memory" else f"{row.status}: {row.note}"


class _Heard(Listener):
    """Passes on what a trial does."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._batch = 0

    def begin(self, batch: int, accumulate: int) -> None:
        self._batch = batch
        self._watcher.progress(0, 1, f"batch {batch}")

    def progress(self, steps: int, of: int) -> None:
        self._watcher.progress(steps, of, f"batch {self._batch}")


def _estimates(asked: _Asked, live: Sequence[_Measured]) -> dict[int, Callable[[int], float]]:
    """Return what the planner predicts of each, by its place, for all at once; a search goes on without it."""
    strategies = [one.arm.strategy for one in live if one.arm.strategy is not None]
    if asked.budget is None:
        return {}
    trials = asked.trials
    try:
        rows = plan(
            trials.workload,
            memory=asked.budget,
            processes=trials.processes,
            strategies=strategies,
            precisions=["fp32"],
            device=trials.device,
        ).rows
    except ShardkitError:
        return {}
    assert len(rows) == len(strategies)
    return {place: row.estimate for place, row in enumerate(rows) if row.peak}


def _find_batch(asked: _Asked, one: _Measured, estimate: Callable[[int], float] | None, *, baseline: bool) -> None:
    """Find the largest batch, or try the one that was asked for, and note what memory it took."""
    assert one.arm.strategy is not None
    listener = _Heard(asked.watcher)

    def search() -> Trial:
        assert one.arm.strategy is not None
        if asked.batch is not None:
            one.tell(trials=1, batch=asked.batch)
            return asked.trials.run(one.arm.strategy, asked.batch, listener=listener).check()
        assert asked.budget is not None
        trials = asked.trials
        planned = Planned(
            trials.workload,
            one.arm.strategy,
            memory=asked.budget,
            processes=trials.processes,
            device=trials.device,
            timeout=min(trials.timeout, PLAN_SECONDS),
            listener=None,
        )
        found = find_max_batch(
            trials,
            one.arm.strategy,
            memory=asked.budget,
            estimate=estimate,
            alternatives=planned.alternatives,
            plan=False,
            listener=listener,
        )
        one.tell(trials=len(found.trials), notes=found.notes)
        return found.best

    trial = _guarded(one, search, baseline=baseline)
    if trial is not None and not trial.fits:
        one.tell(status="out of memory", note=trial.note, details=trial.details)
    elif trial is not None:
        one.tell(batch=trial.batch, peak_memory=trial.peak)


def _guarded(one: _Measured, run: Callable[[], Trial], *, baseline: bool) -> Trial | None:
    """Return the trial; None if there is none, which the row then says.

    Raises:
        InputError: the workload is wrong: the baseline says so.
    """
    try:
        return run()
    except OutOfMemoryError as error:
        one.tell(status="out of memory", note=str(error), batch=1)
    except TrialError as error:
        first, _, details = str(error).partition("\n")
        one.tell(status="failed", note=first, details=details)
    except InputError as error:
        if baseline:
            raise
        one.tell(status="failed", note=str(error))
    except ShardkitError as error:
        one.tell(status="refused", note=str(error))
    return None


def _time(asked: _Asked, one: _Measured, turn: int) -> None:
    """Time an arm once, in fresh processes."""
    strategy, batch = one.arm.strategy, one.arm.row.batch
    assert strategy is not None
    assert batch is not None

    def run() -> Trial:
        trial = asked.trials.run(
            strategy,
            batch,
            steps=WARM_UP_STEPS + asked.steps,
            timed=True,
            evaluate=asked.evaluation_items > 0,
            listener=_Heard(asked.watcher),
        ).check()
        if not trial.fits:
            raise TrialError(f"batch {batch}: out of memory in a timed run, which has no budget: {trial.note}")
        return trial

    trial = _guarded(one, run, baseline=False)
    if trial is None:
        return
    seconds = trial.step_seconds[WARM_UP_STEPS:]
    one.step_seconds += seconds
    one.tokens = trial.tokens
    one.speeds.setdefault(turn, []).append(_samples(asked, batch) / statistics.median(seconds))
    error = next((rank.error for rank in trial.evaluations if rank.error), "")
    if error:
        one.tell(evaluation_note=error)
    elif trial.evaluations:
        # The slowest rank counts, as with the steps.
        batches = [max(ranks) for ranks in zip(*(rank.seconds for rank in trial.evaluations), strict=True)]
        samples = sum(rank.samples for rank in trial.evaluations)
        one.evaluations += [samples / taken for taken in batches]


def _samples(asked: _Asked, batch: int) -> int:
    """Return the samples of an optimizer step on all ranks."""
    return batch * asked.accumulate * asked.trials.processes


def _row(asked: _Asked, one: _Measured, base: _Measured) -> Row:
    row = one.arm.row
    if not one.arm.open or row.batch is None or not one.step_seconds:
        return row
    steps = Spread.of(one.step_seconds)
    assert steps is not None
    batch, samples = row.batch, _samples(asked, row.batch)
    speed = Spread(samples / steps.median, samples / steps.high, samples / steps.low, steps.count)
    tokens = None
    if one.tokens is not None:
        each = one.tokens / batch
        tokens = Spread(speed.median * each, speed.low * each, speed.high * each, speed.count)
    evaluation = None if row.evaluation_note else Spread.of(one.evaluations)
    row = replace(
        row,
        step_seconds=steps,
        samples_per_second=speed,
        tokens_per_second=tokens,
        train_seconds=asked.items / speed.median,
        evaluation_samples_per_second=evaluation,
        evaluation_seconds=None if evaluation is None else asked.evaluation_items / evaluation.median,
    )
    other = base.arm.row
    if not base.arm.open or other.batch is None:
        return row
    shared = sorted(set(one.speeds) & set(base.speeds))
    ratios = [statistics.fmean(one.speeds[turn]) / statistics.fmean(base.speeds[turn]) for turn in shared]
    least = max(other.peak_memory, default=0)
    return replace(
        row,
        batch_ratio=batch / other.batch,
        speed_ratio=Spread.of(ratios),
        memory_ratio=max(row.peak_memory) / least if row.peak_memory and least else None,
    )
