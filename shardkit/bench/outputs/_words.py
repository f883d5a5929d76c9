"""A benchmark in words: the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._sizes import format_bytes
from shardkit.bench._results import Bench, Row, Spread
from shardkit.parity.outputs._tables import Cell, Column, Table

TONES = {"out of memory": "warn", "refused": "dim", "missing": "dim", "failed": "bad"}
"""How what isn't measured is coloured."""


def title(found: Bench) -> str:
    """Return what was measured."""
    settings = found.settings
    limit = f"batch {settings['batch']}" if settings["memory"] is None else f"{format_bytes(settings['memory'])} each"
    accumulated = "" if settings["accumulate"] == 1 else f", {settings['accumulate']} micro-batches a step"
    return f"{settings['workload']}: {settings['processes']} processes on {settings['device']}, {limit}{accumulated}"


def table(found: Bench) -> Table:
    """Return the table: each row's batch, times, speed and memory, with what they are over the baseline's."""
    settings = found.settings
    rows = [_cells(found, row) for row in found.rows]
    names = [
        "largest\nbatch" if settings["batch"] is None else "batch",
        "peak MiB\nper rank",
        "samples/s",
        "speed over\nbaseline",
        "tokens/s",
        f"train s\nfor {settings['items']:,}",
        f"evaluate s\nfor {settings['evaluation_items']:,}",
    ]
    # Of a column that is empty nothing is lost.
    kept = [place for place in range(len(names)) if any(row[place + 2].text not in ("", "-") for row in rows)]
    columns = [Column("strategy", folds=True), Column("")]
    columns += [Column(names[place], number=True) for place in kept]
    return Table(title(found), columns, [[*row[:2], *(row[place + 2] for place in kept)] for row in rows])


def _cells(found: Bench, row: Row) -> list[Cell]:
    name = [Cell(row.strategy), Cell(row.precision)]
    if row.status != "measured":
        tone = TONES[row.status]
        return [*name, Cell(row.outcome.replace("of memory at ", "of\nmemory at\n"), tone), *[Cell("-", "dim")] * 6]
    ratio = row.speed_ratio
    baseline = row is found.baseline
    near = not baseline and found.within_noise(row)
    speed = Cell("baseline" if baseline else _times(ratio.median, _both(ratio, "{:.2f}")) if ratio else "-")
    return [
        *name,
        Cell(_with(str(row.batch), None if baseline or found.settings["batch"] is not None else row.batch_ratio)),
        Cell(_with(f"{max(row.peak_memory, default=0) / 2**20:,.0f}", None if baseline else row.memory_ratio)),
        Cell(_spread(row.samples_per_second)),
        speed._replace(tone="dim" if near or baseline else "good" if ratio and ratio.median > 1 else "warn"),
        Cell(_number(None if row.tokens_per_second is None else row.tokens_per_second.median)),
        Cell(_number(row.train_seconds)),
        Cell(
            "failed" if row.evaluation_note else _number(row.evaluation_seconds), "bad" if row.evaluation_note else ""
        ),
    ]


def _with(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text}\n{ratio:.2f} x"


def _times(ratio: float, quartiles: str) -> str:
    return f"{ratio:.2f} x\n{quartiles}" if quartiles else f"{ratio:.2f} x"


def _spread(spread: Spread | None) -> str:
    """Return the median, and the quartiles below it."""
    if spread is None:
        return "-"
    quartiles = _both(spread)
    return f"{_number(spread.median)}\n{quartiles}" if quartiles else _number(spread.median)


def _both(spread: Spread, form: str = "") -> str:
    """Return the quartiles; nothing where there was one value."""
    if spread.count == 1:
        return ""
    return "-".join(form.format(value) if form else _number(value) for value in (spread.low, spread.high))


def _number(value: float | None) -> str:
    """Return a number of three digits, or of all before the point."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def noise(found: Bench) -> str:
    """Return what the baseline differs from itself by, and so what is no difference."""
    factor = found.noise_factor
    if factor is None:
        return ""
    rounds = "round" if len(found.noise) == 1 else "rounds"
    ratios = ", ".join(f"{ratio:.3f}" for ratio in found.noise)
    return (
        f"The baseline runs twice in each round: in {len(found.noise)} {rounds} it was {ratios} times as fast as "
        f"itself. A speed from {1 / factor:.2f} to {factor:.2f} times the baseline's is no difference here."
    )


def notes(found: Bench) -> Iterator[str]:
    """Yield what there is to say of single rows, and of what could not be evaluated."""
    for row in found.rows:
        if row.note:
            yield f"{row.name}: {row.status}: {row.note}"
        if row.evaluation_note:
            yield f"{row.name}: not evaluated: {row.evaluation_note}"
    for note in dict.fromkeys(note for row in found.rows for note in row.notes):
        which = [row.name for row in found.rows if note in row.notes]
        everywhere = len(which) == sum(row.status == "measured" for row in found.rows)
        yield note[0].upper() + note[1:] if everywhere else f"{', '.join(which)}: {note}"


def method(found: Bench) -> Iterator[str]:
    """Yield how it was measured."""
    settings = found.settings
    if settings["memory"] is not None:
        yield (
            f"The largest batch of a rank is exact: it trained within {format_bytes(settings['memory'])} per rank, and "
            "one more did not, each in fresh processes."
        )
    yield (
        f"Speeds are of {settings['repeats']} rounds of {settings['steps']} steps, after {settings['warm_up_steps']} "
        "that don't count; in each round every row trains once, in fresh processes, one row after another, without a "
        "limit on memory. Below a median are the quartiles."
    )
    yield f"The time to train {settings['items']:,} samples is computed from the median step, not run."
    if settings["evaluation_items"]:
        evaluated = settings["evaluated_batches"]
        yield (
            f"That to evaluate {settings['evaluation_items']:,} is computed from what was timed in each round, with "
            f"whole weights on every rank: {evaluated['loss']} batches' loss, or, where the workload generates, one "
            f"beam search for at most {evaluated['largest_generated']} samples of a rank."
        )
    yield "Peak memory is of the rank that takes most, above what it held before, as the batch was tried."
    yield "x is times the baseline's, which is the first row."


def machine(found: Bench) -> str:
    """Return what it ran on and with, in a line."""
    held = found.hardware
    parts = [str(held["processor"]), f"{held.get('usable_cores', held['cores'])} cores"]
    if "memory" in held:
        parts.append(format_bytes(held["memory"]))
    parts += [f"{gpu['name']} of {format_bytes(gpu['memory'])}" for gpu in held.get("gpus", [])]
    if "load" in held:
        parts.append(f"load {held['load']}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"{', '.join(parts)}; {versions}; {found.date}"
