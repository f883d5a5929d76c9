"""Train one workload under many strategies, and set each against plain torch in one process."""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardkit import _registry
from shardkit._options import typed_options
from shardkit._strategy import Strategy, is_path
from shardkit.errors import (
    InputError,
    LaunchError,
    MissingLibraryError,
    PluginError,
    StrategyError,
    UnsupportedError,
)
from shardkit.tools import _server
from shardkit.tools.listing import versions
from shardkit.workloads import _find

if TYPE_CHECKING:
    from shardkit.tools._trial import Task, Trial

TOLERANCE = 1e-6
"""How far a loss may lie from the reference's, relative to it, in float32.

Trained in float32 and in float64, the reference differs from itself over the default 30 steps by at most 1.9e-7 on
``t5-tiny`` and 2.1e-7 on the other built-in workloads (torch 2.13, CPU; ``pytest -m slow -s tests/workloads`` measures
it). A strategy sums in another order, so that two such errors may lie between it and the reference, and twice that
is left for another machine's order. A wrong scale, a lost gradient or another clipping shows at 1e-3 and more.
"""

WARM_UP_STEPS = 2
"""Steps that the speed leaves out: the first allocate buffers and optimizer states."""

Status = Literal["reference", "agrees", "differs", "unjudged", "failed", "missing"]


@dataclass(frozen=True)
class Row:
    """What came of one strategy.

    ``status`` is ``"unjudged"`` where the precision isn't float32, ``"missing"`` where the library isn't installed,
    or the variant doesn't run on the device.
    ``losses`` are per step, the mean over all micro-batches of all ranks. ``loss_difference`` is the largest over all
    steps, relative to the reference. ``weights_difference`` is the L2 norm of the difference of all trained weights
    at the end, relative to that of the reference's weights. ``samples_per_second`` is over all ranks, for the median
    step. ``peak_memory`` is in bytes, of each rank. ``seconds`` is the wall time of the trial with its start.
    """

    strategy: str
    status: Status
    note: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    loss_difference: float | None = None
    weights_difference: float | None = None
    samples_per_second: float | None = None
    peak_memory: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    details: str = ""

    @property
    def final_loss(self) -> float | None:
        return self.losses[-1] if self.losses else None


@dataclass(frozen=True)
class Comparison:
    """All rows, the reference apart, with the settings and versions that they hold for."""

    settings: dict[str, Any]
    versions: dict[str, str]
    reference: Row
    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """1 if a strategy differs, else 2 if one that was wanted could not run, else 0."""
        found = {row.status for row in self.rows}
        return 1 if "differs" in found else 2 if "failed" in found else 0


class Listener:
    """What a caller hears while a comparison runs; this one ignores it."""

    def begin(self, name: str) -> None:
        """A trial starts."""

    def progress(self, steps: int) -> None:
        """The trial has taken so many steps."""

    def end(self, row: Row) -> None:
        """The trial, or what would have been one, is over."""


def split_strategies(texts: Sequence[str]) -> list[str]:
    """Return the strategies of lists separated by commas, each once; ``name=value`` belongs to what precedes it."""
    found: list[str] = []
    for text in texts:
        open_settings = False
        for part in filter(None, (part.strip() for part in text.split(","))):
            if open_settings and "=" in part.partition(":")[0]:
                found[-1] += f",{part}"
            else:
                found.append(part)
                open_settings = ":" in part
    return list(dict.fromkeys(found))


def compare(
    workload: str,
    strategies: Sequence[str] = (),
    *,
    steps: int = 30,
    processes: int = 2,
    batch_size: int = 8,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    seed: int | None = None,
    device: str = "auto",
    timeout: float = 300,
    listener: Listener | None = None,
) -> Comparison:
    """Train the workload under each strategy, or under every variant of every backend, and in plain torch.

    Each trial has fresh processes; one that fails, or takes longer than ``timeout`` seconds, is a row that says so.

    Raises:
        ShardkitError: the workload, a number or the text of a strategy is wrong, or the reference can't be trained.
    """
    listener = listener or Listener()
    workload = _find.check(workload)
    for name, count in {"steps": steps, "processes": processes, "batch size": batch_size}.items():
        if count < 1:
            raise InputError(f"{name} is at least 1, not {count}")
    shared = {"accumulate": accumulate, "max_grad_norm": max_grad_norm, "seed": seed}
    Strategy("any", **shared)  # type: ignore[arg-type]
    device = _device(device, processes)
    arms = [_wanted(text, shared) for text in strategies] if strategies else list(_installed(shared, device))

    _server.start(workload)
    from shardkit.tools._trial import Task, train_reference, train_strategy

    with tempfile.TemporaryDirectory(prefix="shardkit-compare-") as folder:
        task = Task(
            workload=workload,
            steps=steps,
            processes=processes,
            batch_size=batch_size,
            accumulate=accumulate,
            max_grad_norm=max_grad_norm,
            seed=seed,
            device=device,
            progress=Path(folder, "progress"),
        )
        listener.begin("reference")
        start = time.monotonic()
        trials, failure = _run(listener, task, timeout, 1, train_reference)
        if failure is not None:
            raise failure
        reference = dataclasses.replace(_row("reference", trials, task), seconds=time.monotonic() - start)
        plain = trials[0]
        listener.end(reference)
        rows = []
        for row, strategy in arms:
            if strategy is not None:
                listener.begin(row.strategy)
                start = time.monotonic()
                trials, failure = _run(listener, task, timeout, processes, train_strategy, strategy)
                if failure is not None:
                    row = dataclasses.replace(row, note=headline(failure), details=failure.traceback or "")
                else:
                    row = _judged(_row(row.strategy, trials, task), trials[0], reference, plain, strategy)
                row = dataclasses.replace(row, seconds=time.monotonic() - start)
            listener.end(row)
            rows.append(row)
    settings = {name: value for name, value in dataclasses.asdict(task).items() if name not in ("progress", "workload")}
    return Comparison({"workload": workload, **settings, "tolerance": TOLERANCE}, versions(), reference, rows)


def samples_per_second(seconds: Sequence[float], samples: int) -> float | None:
    """Return the samples of one step over the median time of a step, warm-up left out; None if no step is left."""
    counted = seconds[WARM_UP_STEPS:]
    return samples / statistics.median(counted) if counted else None


def _wanted(text: str, shared: dict[str, Any]) -> tuple[Row, Strategy | None]:
    """Return the row to be of a strategy that was asked for, and the strategy itself if it can run.

    Raises:
        StrategyError: the text is wrong, or sets for one strategy what holds for all.
    """
    strategy = _resolve(text)
    for name in shared:
        if getattr(strategy, name) != getattr(Strategy("any"), name):
            raise StrategyError(
                f"strategy {text!r} sets {name!r}, which holds for all strategies of a comparison: use "
                f"--{name.replace('_', '-')}"
            )
    row = Row(text, "failed")
    try:
        backend = _registry.describe(strategy.backend)
        typed_options(backend, strategy.options)
        _registry.require_library(backend)
    except PluginError as error:
        return dataclasses.replace(row, note=str(error)), None
    return row, dataclasses.replace(strategy, **shared)


def _resolve(text: str) -> Strategy:
    if not is_path(text):
        return Strategy.parse(text)
    from shardkit._prepare import resolve

    return resolve(text)


def _installed(shared: dict[str, Any], device: str) -> Iterator[tuple[Row, Strategy | None]]:
    """Yield every variant of every backend, in the order of names; one that can't run here is a row that says why."""
    import torch

    from shardkit._checks import check_fit

    for name in _registry.claims():
        try:
            backend = _registry.describe(name)
        except PluginError as error:
            yield Row(name, "failed", str(error)), None
            continue
        for variant in backend.variants:
            try:
                _registry.require_library(backend)
                check_fit(backend, Strategy.parse(variant.strategy), torch.device(device))
            except (MissingLibraryError, UnsupportedError) as error:
                yield Row(variant.strategy, "missing", str(error)), None
                continue
            yield _wanted(variant.strategy, shared)


def _device(device: str, processes: int) -> str:
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "cpu"


def _run(
    listener: Listener, task: Task, timeout: float, processes: int, function: Callable[..., Any], *arguments: Any
) -> tuple[list[Trial], LaunchError | None]:
    from shardkit.tools import _ranks
    from shardkit.tools._trial import Refusal

    log = task.progress.with_name("log")
    for file in (log, task.progress):
        file.write_bytes(b"")
    try:
        with _watched(task.progress, listener):
            trials = _ranks.run(
                function, task, *arguments, processes=processes, timeout=timeout, workload=task.workload, log=log
            )
    except LaunchError as error:
        printed = log.read_text(errors="replace")[-4000:]
        told = "\n".join(filter(None, [error.traceback, printed and f"printed by the ranks:\n{printed}"]))
        return [], LaunchError(str(error), error.rank, told)
    refused = next((trial for trial in trials if isinstance(trial, Refusal)), None)
    if refused is not None:
        return [], LaunchError(refused.message)
    return trials, None


@contextmanager
def _watched(progress: Path, listener: Listener) -> Iterator[None]:
    """Tell the listener how far the trial is, from a thread: this one waits for the ranks."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            listener.progress(progress.stat().st_size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def headline(error: LaunchError) -> str:
    """Return an error in one line: the last line of a traceback that isn't a note under it."""
    text = str(error)
    if error.rank is None or "Traceback (most recent call last)" not in text:
        return text
    lines = [line for line in text.splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return f"rank {error.rank}: {lines[-1]}" if lines else text.splitlines()[-1]


def _row(name: str, trials: list[Trial], task: Task) -> Row:
    """Return what the ranks measured together; the slowest of them is the speed of a step."""
    samples = task.batch_size * task.accumulate * task.processes
    return Row(
        name,
        "reference",
        losses=[statistics.fmean(losses) for losses in zip(*(trial.losses for trial in trials), strict=True)],
        samples_per_second=samples_per_second(
            [max(seconds) for seconds in zip(*(trial.seconds for trial in trials), strict=True)], samples
        ),
        peak_memory=[trial.peak_memory for trial in trials],
    )


def _judged(row: Row, trial: Trial, reference: Row, plain: Trial, strategy: Strategy) -> Row:
    differences = [_relative(loss, right) for loss, right in zip(row.losses, reference.losses, strict=True)]
    worst = max(differences)
    at = differences.index(worst)
    row = dataclasses.replace(
        row,
        status="agrees",
        loss_difference=worst,
        weights_difference=_weights_difference(trial.weights, plain.weights),
    )
    if strategy.precision != "fp32":
        return dataclasses.replace(row, status="unjudged", note=f"no tolerance is stated for {strategy.precision}")
    if worst <= TOLERANCE:
        return row
    note = f"step {at + 1}: loss {row.losses[at]:.7g}, the reference's is {reference.losses[at]:.7g}"
    return dataclasses.replace(row, status="differs", note=note)


def _relative(value: float, right: float) -> float:
    if value == right:
        return 0.0
    difference = abs(value - right) / max(abs(right), 1e-30)
    return difference if difference == difference else float("inf")


def _weights_difference(weights: dict[str, Any], right: dict[str, Any]) -> float | None:
    if not set(right) <= set(weights):
        return None
    apart = sum(float((weights[name].double() - value.double()).square().sum()) for name, value in right.items())
    whole = sum(float(value.double().square().sum()) for value in right.values())
    return (apart / whole) ** 0.5 if whole else None
