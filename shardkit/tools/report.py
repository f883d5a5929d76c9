"""A comparison as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from shardkit.tools.compare import Comparison, Row

_STYLES = {
    "reference": "dim",
    "agrees": "green",
    "differs": "bold red",
    "unjudged": "yellow",
    "failed": "bold red",
    "missing": "dim",
}


def table(comparison: Comparison) -> Table:
    """Return the table that ``shardkit compare`` prints; memory is the largest of any rank."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    settings = comparison.settings
    found = Table(
        title=f"{settings['workload']}: {settings['steps']} steps on {settings['device']}, {settings['processes']} "
        f"processes x {settings['accumulate']} x {settings['batch_size']} samples",
        title_justify="left",
        caption=_legend(comparison),
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("strategy", overflow="fold", vertical="bottom")
    for name in ("final\nloss", "loss\ndifference", "weights\ndifference", "samples/s", "peak MiB\nper rank"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    for row in [comparison.reference, *comparison.rows]:
        label = "1 process, plain torch" if row.status == "reference" else row.strategy
        found.add_row(Text(label), *_cells(row), Text(row.status, style=_STYLES[row.status]))
    return found


def notes(comparison: Comparison) -> list[str]:
    """Return what there is to say of single rows, a line each."""
    return [f"{row.strategy}: {row.note}" for row in comparison.rows if row.note]


def _legend(comparison: Comparison) -> str:
    first, last = comparison.reference.losses[0], comparison.reference.losses[-1]
    return (
        f"The reference is plain torch on the whole global batch; its loss fell from {first:.3f} to {last:.3f}. The "
        f"loss difference is the largest of any step, relative to it: at most {comparison.settings['tolerance']:g} "
        "agrees."
    )


def _cells(row: Row) -> list[str]:
    return [
        _number(row.final_loss, ".6f"),
        _number(row.loss_difference, ".1e"),
        _number(row.weights_difference, ".1e"),
        _number(row.samples_per_second, ".1f"),
        f"{max(row.peak_memory) / 2**20:.1f}" if row.peak_memory else "-",
    ]


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else format(value, form)


def as_json(comparison: Comparison) -> str:
    """Return the comparison as one JSON object; a number that isn't finite is null."""
    return to_json(
        {
            "settings": comparison.settings,
            "versions": comparison.versions,
            "exit_code": comparison.exit_code,
            "reference": _plain(comparison.reference),
            "strategies": [_plain(row) for row in comparison.rows],
        }
    )


def to_json(value: Any) -> str:
    """Return indented JSON in which a number that isn't finite is null, since JSON has no word for it."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _plain(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "final_loss": row.final_loss}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check(output: Path | None) -> None:
    """Raise, before anything is run, unless the directory of a command's results is there or can be made.

    Raises:
        InputError: it can't be made.
    """
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output: {str(output)!r} can't be made: {error.strerror}") from error


def write(comparison: Comparison, directory: Path) -> list[Path]:
    """Write ``compare.json`` and ``compare.png`` into the directory, which is made if need be; return both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    text, picture = directory / "compare.json", directory / "compare.png"
    text.write_text(as_json(comparison) + "\n", encoding="utf-8")
    draw(comparison, picture)
    return [text, picture]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw loss curves, the differences from the reference, and bars of speed and memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in comparison.rows if row.losses]
    lines = sum(_label(row).count("\n") + 1 for row in rows) + 1
    figure = Figure(figsize=(12, 5.5 + 0.35 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    settings = comparison.settings
    figure.suptitle(
        f"{Path(settings['workload']).name}: {settings['processes']} processes on {settings['device']}, "
        f"{settings['accumulate']} x {settings['batch_size']} samples each per step"
    )
    # Two figures in one, so that the long names beside the bars leave the curves their width.
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[4.0, 1.0 + 0.35 * lines]).flat
    curves, apart = above.subplots(1, 2)
    _draw_curves(curves, comparison.reference, rows)
    _draw_differences(apart, comparison, rows)
    speed, memory = below.subplots(1, 2, sharey=True)
    shown = [comparison.reference, *rows]
    _draw_bars(speed, shown, [row.samples_per_second or 0.0 for row in shown], "samples/s")
    _draw_bars(memory, shown, [max(row.peak_memory) / 2**20 for row in shown], "peak memory of a rank, MiB")
    speed.invert_yaxis()
    figure.savefig(path)


def _label(row: Row) -> str:
    return row.strategy.replace(",", ",\n")


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["tab10" if count <= 10 else "tab20"](place) for place in range(count)]


def _draw_curves(axes: Axes, reference: Row, rows: list[Row]) -> None:
    """Draw the losses, in the colours of the bars below; the reference is the wide grey curve."""
    steps = range(1, len(reference.losses) + 1)
    axes.plot(steps, reference.losses, color="0.8", linewidth=8, solid_capstyle="round")
    for place, (row, colour) in enumerate(zip(rows, _colours(len(rows)), strict=True)):
        # Curves that agree lie on each other: dashes of different phase let each be seen.
        pattern = (3.0 * place, (3.0, 3.0 * (len(rows) - 1))) if len(rows) > 1 else "solid"
        axes.plot(steps, row.losses, color=colour, linewidth=2, linestyle=pattern)
    axes.set(title="loss (colours as below, the reference wide and grey)", xlabel="step")
    axes.grid(alpha=0.3)


def _draw_differences(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    tolerance = comparison.settings["tolerance"]
    steps = range(1, len(comparison.reference.losses) + 1)
    for row, colour in zip(rows, _colours(len(rows)), strict=True):
        apart = [
            abs(loss - right) / abs(right or 1e-30)
            for loss, right in zip(row.losses, comparison.reference.losses, strict=True)
        ]
        axes.plot(steps, apart, color=colour, linewidth=1.2, marker=".", markersize=5)
    axes.axhline(tolerance, color="black", linestyle="--", linewidth=1)
    axes.annotate("tolerance", (steps[0], tolerance), xytext=(0, 3), textcoords="offset points", fontsize="small")
    # Linear up to the last bit of float32, so that what is exactly equal has its place at 0.
    axes.set_yscale("symlog", linthresh=3e-8)
    axes.set_ylim(-1e-8, max(axes.get_ylim()[1], 10 * tolerance))
    axes.set(title="difference of the loss from the reference, relative", xlabel="step")
    axes.grid(alpha=0.3)


def _draw_bars(axes: Axes, rows: list[Row], values: list[float], title: str) -> None:
    colours = ["0.75", *_colours(len(rows) - 1)]
    bars = axes.barh([_label(row) for row in rows], values, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
    axes.margins(x=0.12)
    axes.set(title=title)
    axes.spines[["top", "right"]].set_visible(False)
