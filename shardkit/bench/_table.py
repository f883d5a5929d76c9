"""The table: every strategy's largest batch, speed and memory, relative to plain data parallelism."""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from shardkit._sizes import parse_bytes
from shardkit.bench import _machine
from shardkit.bench._arms import Arm, arms
from shardkit.bench._results import Bench, Row, Spread
from shardkit.bench._trials import Listener, Trial, Trials
from shardkit.errors import InputError, LaunchError, ShardkitError, TrialError
from shardkit.tools.compare import headline, versions, watched

if TYPE_CHECKING:
    from shardkit.bench._timing import Times
    from shardkit.workloads import Workload


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

    The batch is the largest that fits into ``memory`` per rank, such as ``"24GiB"``, or ``batch`` for all. ``precisions``
    are fp32 unless said otherwise. The first row is the ``baseline``: the first variant that shards nothing, in fp32,
    unless said otherwise. Training is timed for ``steps`` steps in each of ``repeats`` rounds; times for ``items``
    samples of training, and ``evaluation_items`` of evaluation, are computed from that; 0 leaves the evaluation out.
    ``timeout`` is the seconds after which a trial that comes no further is given up.

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
        plan = _Plan(
            trials, batch, budget, accumulate, items, evaluation_items, steps, repeats, timeout, watcher or Watcher()
        )
        found = [_Measured(arm) for arm in arms(strategies, precisions, baseline, accumulate, trials.device)]
        _run(plan, found)
    return Bench(
        settings=plan.settings(),
        versions=versions(),
        hardware=_machine.hardware(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command="",
        rows=tuple(_row(plan, one, found[0]) for one in found),
        noise=Spread.of([runs[1] / runs[0] for runs in found[0].speeds.values() if len(runs) == 2]),
    )


def _check_count(name: str, count: Any, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InputError(f"{name} is a whole number from {least} on, not {count!r}")


@dataclass(frozen=True)
class _Plan:
    trials: Trials
    batch: int | None
    budget: int | None
    accumulate: int
    items: int
    evaluation_items: int
    steps: int
    repeats: int
    timeout: float
    watcher: Watcher

    def settings(self) -> dict[str, Any]:
        from shardkit.bench._timing import LARGEST_GENERATED, LOSS_BATCHES, WARM_UP_STEPS

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
    trial: Trial | None = None
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Samples per second, over all ranks."""
    tokens: int | None = None
    speeds: dict[int, list[float]] = field(default_factory=dict)

    def tell(self, **what: Any) -> None:
        """Put something into the row."""
        self.arm.row = replace(self.arm.row, **what)


def _run(plan: _Plan, found: list[_Measured]) -> None:
    """Find the batch of each arm, then time all that have one, round after round."""
    live = [one for one in found if one.arm.open]
    plan.watcher.plan(len(live) + plan.repeats * (len(live) + 1))
    for one in live:
        start = time.monotonic()
        plan.watcher.begin(one.arm.row.name)
        _find_batch(plan, one, baseline=one is found[0])
        row = one.arm.row
        one.tell(seconds=time.monotonic() - start)
        plan.watcher.end(f"{row.name}: {f'batch {row.batch}' if one.arm.open else told(row)}")
    # The process that forked those is idle from now on, and holds what it imported.
    plan.trials.close()
    with tempfile.TemporaryDirectory(prefix="shardkit-bench-") as folder:
        for turn in range(plan.repeats):
            # There and back, so that a machine that gets slower through a round favours none.
            others = [one for one in found[1:] if one.arm.open]
            for one in (found[0], *(others if turn % 2 == 0 else reversed(others)), found[0]):
                if one.arm.open:
                    start = time.monotonic()
                    what = f"{one.arm.row.name}, round {turn + 1} of {plan.repeats}"
                    plan.watcher.begin(what)
                    _time(plan, one, turn, Path(folder))
                    one.tell(seconds=one.arm.row.seconds + time.monotonic() - start)
                    plan.watcher.end(f"{what}: {_speed(one, turn) if one.arm.open else told(one.arm.row)}")


def _speed(one: _Measured, turn: int) -> str:
    return f"{one.speeds[turn][-1]:.4g} samples/s"


def told(row: Row) -> str:
    """Return in a line why a row has no numbers."""
    if row.status == "out of memory":
        return f"out of memory at batch {row.batch}"
    return f"{row.status}: {row.note}"


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


def _find_batch(plan: _Plan, one: _Measured, *, baseline: bool) -> None:
    """Find the largest batch, or try the one that was asked for, and note what memory it took."""
    assert one.arm.strategy is not None
    listener = _Heard(plan.watcher)
    try:
        if plan.batch is not None:
            trial = plan.trials.run(one.arm.strategy, plan.batch, listener=listener).check()
            one.tell(trials=1)
        else:
            raise NotImplementedError
    except TrialError as error:
        first, _, details = str(error).partition("\n")
        one.tell(status="failed", note=first, details=details)
    except InputError as error:
        if baseline:
            raise
        one.tell(status="failed", note=str(error))
    except ShardkitError as error:
        one.tell(status="refused", note=str(error))
    else:
        one.trial = trial
        one.tell(batch=trial.batch, peak_memory=trial.peak)
        if not trial.fits:
            one.tell(status="out of memory", note=trial.note, details=trial.details)


def _time(plan: _Plan, one: _Measured, turn: int, folder: Path) -> None:
    """Time an arm once, in fresh processes."""
    from shardkit.bench._timing import WARM_UP_STEPS, Timed, run
    from shardkit.tools import _ranks
    from shardkit.tools._trial import Refusal

    row = one.arm.row
    assert one.arm.strategy is not None
    assert row.batch is not None
    progress, log = folder / "progress", folder / "log"
    for file in (progress, log):
        file.write_bytes(b"")
    workload = plan.trials.workload
    task = Timed(
        workload, one.arm.strategy, row.batch, plan.steps, plan.evaluation_items > 0, plan.trials.device, progress
    )
    parts = WARM_UP_STEPS + plan.steps + task.evaluate
    # To start and to evaluate may take as long as a trial may without a step.
    allowed = 2 * plan.timeout + 10 * parts * max(one.trial.step_seconds if one.trial is not None else [0.0])
    try:
        with watched(progress, lambda done: plan.watcher.progress(done, parts, "")):
            ranks: list[Times | Refusal] = _ranks.run(
                run,
                task,
                processes=plan.trials.processes,
                timeout=allowed,
                workload=workload if isinstance(workload, str) else "",
                log=log,
            )
    except LaunchError as error:
        printed = log.read_text(errors="replace")[-4000:]
        details = "\n".join(filter(None, [error.traceback, printed and f"printed by the ranks:\n{printed}"]))
        one.tell(status="failed", note=f"in a timed run, {headline(error)}", details=details)
        return
    times = [rank for rank in ranks if not isinstance(rank, Refusal)]
    if len(times) < len(ranks):
        note = next(rank.message for rank in ranks if isinstance(rank, Refusal))
        one.tell(status="refused", note=note)
        return
    _note(plan, one, turn, times)


def _note(plan: _Plan, one: _Measured, turn: int, times: list[Times]) -> None:
    """Keep what the ranks of a run took: the slowest of them is the speed of a step."""
    assert one.arm.row.batch is not None
    slowest = [max(step) for step in zip(*(rank.steps for rank in times), strict=True)]
    one.step_seconds += slowest
    one.tokens = times[0].tokens
    samples = one.arm.row.batch * plan.accumulate * len(times)
    one.speeds.setdefault(turn, []).append(samples / statistics.median(slowest))
    error = next((rank.evaluation_error for rank in times if rank.evaluation_error), "")
    if error:
        one.tell(evaluation_note=error)
    else:
        batches = [max(batch) for batch in zip(*(rank.evaluations for rank in times), strict=True)]
        one.evaluations += [times[0].evaluated * len(times) / seconds for seconds in batches]


def _row(plan: _Plan, one: _Measured, base: _Measured) -> Row:
    row = one.arm.row
    if not one.arm.open or row.batch is None:
        return row
    steps = Spread.of(one.step_seconds)
    assert steps is not None
    samples = row.batch * plan.accumulate * plan.trials.processes
    speed = Spread(samples / steps.median, samples / steps.high, samples / steps.low, steps.count)
    tokens = None
    if one.tokens is not None:
        each = one.tokens / row.batch
        tokens = Spread(speed.median * each, speed.low * each, speed.high * each, speed.count)
    evaluation = None if row.evaluation_note else Spread.of(one.evaluations)
    row = replace(
        row,
        step_seconds=steps,
        samples_per_second=speed,
        tokens_per_second=tokens,
        train_seconds=plan.items / speed.median,
        evaluation_samples_per_second=evaluation,
        evaluation_seconds=None if evaluation is None else plan.evaluation_items / evaluation.median,
    )
    if not base.arm.open or base.arm.row.batch is None:
        return row
    shared = sorted(set(one.speeds) & set(base.speeds))
    ratios = [statistics.fmean(one.speeds[turn]) / statistics.fmean(base.speeds[turn]) for turn in shared]
    own, other = row.peak_memory, base.arm.row.peak_memory
    return replace(
        row,
        batch_ratio=row.batch / base.arm.row.batch,
        speed_ratio=Spread.of(ratios),
        memory_ratio=max(own) / max(other) if own and other and max(other) else None,
    )
