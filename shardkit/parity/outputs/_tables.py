"""The tables as data: the terminal and the page each draw the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.parity._results import Comparison, Distances, Measured, Report, Row, Side
from shardkit.parity.outputs import _words

TONES = {
    "identical": "good",
    "same": "good",
    "parity": "good",
    "round-off": "good",
    "different": "bad",
    "no parity": "bad",
    "could not run": "bad",
    "incomparable": "warn",
    "unjudged": "warn",
    "refused": "dim",
}
"""How a verdict is coloured."""


class Cell(NamedTuple):
    """A text, and its colour: ``"good"``, ``"warn"``, ``"bad"``, ``"dim"`` or none."""

    text: str
    tone: str = ""


class Column(NamedTuple):
    name: str
    number: bool = False
    folds: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title; ``note`` goes below."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    note: str = ""


def _row(*cells: str | Cell) -> list[Cell]:
    return [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]


def differences(found: Comparison, names: tuple[str, str], most: int | None = None, width: int | None = None) -> Table:
    """Return what isn't the same about two runs; ``most`` rows, of values of ``width`` characters at most."""
    shown = _words.ordered(found.differences)
    left = len(shown) - most if most is not None and len(shown) > most else 0
    rows = [
        _row(item.kind, _words.line(item.what), *_words.sides_of(item, width))
        for item in (shown[:most] if left else shown)
    ]
    columns = [Column("kind"), Column("what", folds=True), *(Column(name, folds=True) for name in names)]
    return Table(
        "What differs about the two runs",
        columns,
        rows,
        f"{left} more in the JSON and the HTML outputs" if left else "",
    )


def steps(found: Comparison) -> list[int]:
    """Return the steps that tell how a gap grows: the first, where they part, then 1, 2, 4, ... later, the last."""
    last = min(len(found.loss_a), len(found.loss_b))
    parting = found.parting or found.first_bit
    start = parting.step if parting is not None else 1
    marks = [1, start]
    if found.first_bit is not None:
        marks.append(found.first_bit.step)
    stride = 1
    while start + stride < last:
        marks.append(start + stride)
        stride *= 2
    return sorted({step for step in [*marks, last] if 1 <= step <= last})


def growth(found: Comparison, names: tuple[str, str]) -> Table:
    """Return losses and gaps at some steps."""
    columns = [
        Column(name, number=True)
        for name in ("step", *(f"loss {name}" for name in names), "loss gap", "norm gap", "gradients", "weights")
    ]
    gaps = found.gaps
    rows = []
    for step in steps(found):
        series = [] if gaps is None else [gaps.loss, gaps.gradient_norm, gaps.gradients, gaps.weights]
        held = [_words.gap(one[step - 1]) if step <= len(one) else "-" for one in series] or ["-"] * 4
        losses = (_words.loss(found.loss_a[step - 1]), _words.loss(found.loss_b[step - 1]))
        rows.append(_row(str(step), *losses, *held))
    return Table("How the gap grows", columns, rows, "Gaps are relative to the first run; 0 is equal to the last bit.")


def suite(report: Report) -> Table:
    """Return a row for each strategy of a suite, with its distances beside the baseline's own."""
    side = report.sides[0] if report.sides else None
    baseline = side.baseline if side is not None else None
    held = baseline.distances if baseline is not None else None
    columns = [
        Column("strategy", folds=True),
        Column("verdict"),
        Column("repeat-\nable"),
        *(Column(name, number=True) for name in ("loss", "gradient\nnorm", "weights", "loss\nULPs")),
        *(Column(name, number=True) for name in ("samples/s", "peak MiB\nper rank")),
    ]
    rows = []
    if baseline is not None:
        failed = baseline.failure is not None
        label = Cell("could not run", "bad") if failed else Cell("baseline", "dim")
        rows.append(_row(Cell("plain data parallel of torch", "dim"), label, *_measured(baseline, None)))
    for row in report.rows:
        rows.append(
            _row(_words.strategy(row), Cell(row.verdict, TONES.get(row.verdict, "")), *_measured(row.before, held))
        )
    note = "loss, gradient norm and weights: distance from float64, and below it how many times the baseline's own."
    return Table("Strategies", columns, rows, note)


def _measured(measured: Measured, base: Distances | None) -> list[Cell]:
    repeats = _words.repeatable(measured)
    own = measured.distances
    cells = [Cell(repeats, "bad" if repeats == "NO" else "")]
    for name in ("loss", "gradient_norm", "weights"):
        distance = getattr(own, name) if own is not None else None
        ratio = _words.ratio(distance, getattr(base, name) if base is not None else None)
        cells.append(Cell(_words.gap(distance) + ("" if ratio is None else f"\n{_words.times(ratio)}")))
    cells.append(Cell(_words.ulps(own.loss_ulps if own is not None else None)))
    cells.append(Cell(_words.number(measured.samples_per_second, ".1f")))
    cells.append(Cell(_words.number(_words.mebibytes(measured), ".1f")))
    return cells


def sides(report: Report) -> Table:
    """Return a row for each package whose version is told, what differs between the sides first."""
    names = sorted({name for side in report.sides for name in (*side.versions, *side.wanted)})
    rows = []
    for name in names:
        held = [_version(side, name) for side in report.sides]
        apart = len(set(held)) > 1
        rows.append((not apart, _row(Cell(name, "warn" if apart else "dim"), *(_words.line(item) for item in held))))
    columns = [Column("package"), *(Column(name, folds=True) for name in _words.names_of(report)[: len(report.sides)])]
    return Table("Environments", columns, [row for _, row in sorted(rows, key=lambda item: item[0])])


def _version(side: Side, name: str) -> str:
    held, wanted = side.versions.get(name), side.wanted.get(name)
    if held is None:
        return f"{wanted} wanted" if wanted is not None else "-"
    return held if wanted in (None, held) else f"{held} ({wanted} wanted)"


def upgrade(report: Report) -> Table:
    """Return a row for each strategy on two sides."""
    columns = [
        Column("strategy", folds=True),
        Column("verdict"),
        Column("why", folds=True),
        Column("last loss\nbefore, after", number=True),
        Column("speed", number=True),
        Column("peak\nmemory", number=True),
    ]
    rows = []
    for row in report.rows:
        before, after = final_losses(row)
        losses = "-" if before is None and after is None else f"{_words.loss(before)}\n{_words.loss(after)}"
        # Of one run on each side nobody knows what is noise.
        spread = "± unknown" if row.speed_spread is None else f"± {100 * row.speed_spread:.2g} %"
        speed = _words.times(row.speed_ratio) + (f"\n{spread}" if row.speed_ratio is not None else "")
        verdict = Cell(row.verdict, TONES.get(row.verdict, ""))
        memory = _words.times(row.memory_ratio)
        rows.append(_row(_words.strategy(row), verdict, _words.line(row.reason), losses, speed, memory))
    return Table("Strategies", columns, rows, "Speed (samples/s) and peak memory: after over before.")


def final_losses(row: Row) -> tuple[float | None, float | None]:
    compared = row.comparison
    return (
        _words.final_loss(row.before, compared.loss_a if compared is not None else None),
        _words.final_loss(row.after, compared.loss_b if compared is not None else None),
    )


def performance(report: Report) -> Table:
    """Return speed, memory and repeatability of each strategy, on each side."""
    columns = [Column("strategy", folds=True), Column("environment", folds=True), Column("runs", number=True)]
    columns += [Column("repeatable")]
    columns += [Column(name, number=True) for name in ("step, ms", "samples/s", "peak MiB of each rank")]
    rows = []
    for what, side, measured in all_measured(report):
        times = [1000 * seconds for seconds in measured.step_seconds]
        span = "-" if not times else " ".join(format(time, ".4g") for time in times)
        memory = " ".join(format(taken / 2**20, ".1f") for taken in measured.peak_memory) or "-"
        speed = _words.number(measured.samples_per_second, ".1f")
        repeats = _words.repeatable(measured)
        told = Cell(repeats, "bad" if repeats == "NO" else "")
        rows.append(_row(what, side, str(measured.runs), told, span, speed, memory))
    note = "A step's time is the median of its run, the slowest rank's; one number for each run."
    return Table("Speed and memory", columns, rows, note)


def all_measured(report: Report) -> Iterator[tuple[str, str, Measured]]:
    """Yield what was run: its name, its environment, what was measured."""
    names = _words.names_of(report)
    for name, side in zip(names, report.sides, strict=False):
        if side.baseline is not None:
            yield "baseline", name, side.baseline
    for row in report.rows:
        for name, measured in zip(names, (row.before, row.after), strict=False):
            if measured is not None:
                yield _words.strategy(row), name, measured


def changed(report: Report, most: int | None = None, width: int | None = None) -> Table:
    """Return the settings that the library resolves in another way than before."""
    found = _words.changed(report)
    left = len(found) - most if most is not None and len(found) > most else 0
    rows = [
        _row(_words.line(item.what), *_words.sides_of(item, width), _which(names, len(report.rows)))
        for item, names in (found[:most] if left else found)
    ]
    columns = [Column(name, folds=True) for name in ("setting", "before", "after", "strategies")]
    note = f"{left} more in the JSON and the HTML outputs" if left else ""
    return Table("Defaults that changed", columns, rows, note)


def _which(names: Sequence[str], rows: int) -> str:
    return "all" if len(names) == rows and rows > 1 else ", ".join(names)
