"""A plan as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit._sizes import format_bytes
from shardkit.tools.report import to_json

if TYPE_CHECKING:
    from rich.table import Table

    from shardkit.planner._results import Plan, Row

_PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")
_TITLES = {
    "parameters": "para-\nmeters",
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activa-\ntions",
}
_COLOURS = ("#3b82c4", "#e07b1a", "#2f9e6e", "#8a8f98", "#a463c9")


def table(plan: Plan) -> Table:
    """Return the table that ``shardkit plan`` prints."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    settings = plan.settings
    limit = "no limit" if settings["memory"] is None else f"{format_bytes(settings['memory'])} per rank"
    known = [row for row in plan.rows if row.status != "refused"]
    parts = [*_PARTS, *(["host"] if any(row.host for row in known) else [])]
    unit, name = (2**30, "GiB") if max((row.peak for row in known), default=0) >= 10 * 2**30 else (2**20, "MiB")
    found = Table(
        title=f"{settings['workload']}: {plan.parameters:,} parameters, {settings['processes']} ranks on "
        f"{settings['device']}, {limit}",
        title_justify="left",
        caption=f"{name} of the fullest rank at its peak, and what of it is what; 'when' is the moment of the peak.",
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("strategy", overflow="fold", vertical="bottom", min_width=26)
    found.add_column("", no_wrap=True, vertical="bottom")
    for title in ("largest\nbatch", "at\nbatch", "peak", "when", *(_TITLES.get(part, part) for part in parts)):
        found.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for row in plan.rows:
        style = "red" if row.status == "short" else "bold green" if row is plan.fastest else ""
        style = "dim" if row.status == "refused" else style
        names = Text(_plain(row.strategy).replace(",", ",\n"), style=style), Text(row.precision, style=style)
        if row.status == "refused":
            found.add_row(*names, "refused", style="dim")
            continue
        largest = "-" if row.largest is None else str(row.largest)
        sizes = [_number(getattr(row, part), unit) for part in parts]
        found.add_row(*names, largest, str(row.batch), _number(row.peak, unit), row.moment, *sizes)
    return found


def notes(plan: Plan) -> list[str]:
    """Return what there is to say of the rows and of the plan, a line each."""
    lines = [f"{row.strategy}: {row.note}" for row in plan.rows if row.note]
    lines += [f"{row.strategy}: {shortage(row)}" for row in plan.rows if row.status == "short"]
    lines += plan.notes
    if plan.settings["memory"] is not None:
        lines.append(why(plan))
    return lines


def shortage(row: Row) -> str:
    """Return what is missing for batch 1, in words."""
    parts = sorted(((getattr(row, part), part) for part in _PARTS), reverse=True)
    held = ", ".join(f"{part} {format_bytes(size)}" for size, part in parts if size > row.peak / 100)
    return f"{format_bytes(row.short)} short at batch 1, in the {row.moment}: {held}"


def why(plan: Plan) -> str:
    """Return which strategy is the fastest that fits, and why, in words."""
    best = plan.fastest
    if best is None:
        least = plan.least
        if least is None:
            return "nothing fits: every strategy is refused"
        return (
            f"nothing fits: {least.strategy} needs least, {format_bytes(least.peak)} per rank at batch 1. More ranks "
            "or memory, shorter samples or gradient checkpointing would help"
        )
    faster = [row for row in plan.rows if row.status == "short" and (row.speed or 0) > (best.speed or 0)]
    told = f"fastest that fits: {best.strategy}" + (f", up to batch {best.largest}" if best.largest else "")
    if best.speed is not None:
        told += f"; it trains at {best.speed:g} of plain data parallel's speed, as measured for its backend"
    if faster:
        told += f". {', '.join(row.strategy for row in faster)} would be faster and don't fit"
    return told


def as_json(plan: Plan) -> str:
    """Return the plan as one JSON object."""
    best = plan.fastest
    return to_json(
        {
            "settings": plan.settings,
            "versions": plan.versions,
            "parameters": plan.parameters,
            "fastest": None if best is None else best.strategy,
            "rows": [dataclasses.asdict(row) for row in plan.rows],
            "notes": plan.notes,
            "seconds": plan.seconds,
        }
    )


def write(plan: Plan, directory: Path) -> list[Path]:
    """Write ``plan.json`` and ``plan.png`` into the directory, which is made if need be; return both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    text, picture = directory / "plan.json", directory / "plan.png"
    text.write_text(as_json(plan) + "\n", encoding="utf-8")
    draw(plan, picture)
    return [text, picture]


def draw(plan: Plan, path: Path) -> None:
    """Draw what each strategy holds at its peak as bars of its parts, with the limit, and the largest batches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in plan.rows if row.status != "refused"]
    figure = Figure(figsize=(13, 2.2 + 0.42 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    settings = plan.settings
    figure.suptitle(
        f"{Path(settings['workload']).name}: {plan.parameters / 1e6:,.0f} million parameters on "
        f"{settings['processes']} ranks, {settings['device']}"
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    names = [_label(row) for row in rows]
    unit = 2**30
    start = [0.0] * len(rows)
    for part, colour in zip(_PARTS, _COLOURS, strict=True):
        sizes = [getattr(row, part) / unit for row in rows]
        left.barh(names, sizes, left=start, color=colour, label=part)
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    for place, row in enumerate(rows):
        left.annotate(f"batch {row.batch}", (start[place], place), xytext=(3, -3), textcoords="offset points", size=7)
    if settings["memory"] is not None:
        left.axvline(settings["memory"] / unit, color="black", linestyle="--", linewidth=1)
    left.set(title="GiB of the fullest rank at its peak", xlim=(0, 1.12 * max([*start, 1e-9])))
    left.legend(fontsize="small", ncols=len(_PARTS), loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False)
    bars = right.barh(names, [row.largest or 0 for row in rows], color="0.6")
    right.bar_label(bars, padding=3, fontsize="small")
    right.margins(x=0.15)
    right.set(title="largest batch that fits")
    left.margins(y=0.01)
    left.tick_params(axis="y", labelsize=8)
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _number(size: int, unit: int) -> str:
    return f"{size / unit:.1f}" if size else "-"


def _label(row: Row) -> str:
    """Return the strategy in lines that aren't long, with its precision."""
    lines = [""]
    for part in re.split(r"(?<=,)", _plain(row.strategy)):
        if len(lines[-1]) + len(part) > 42:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines) + f"  {row.precision}"


def _plain(strategy: str) -> str:
    """Return a strategy without its precision, which has a column of its own."""
    return re.sub(r"[:,]precision=\w+", "", strategy)
