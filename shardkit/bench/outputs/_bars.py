"""What the pictures show: bars by row, as data, and drawn as SVG without any library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardkit.bench._results import Bench, Row
from shardkit.parity.outputs._page import escaped


class Bar(NamedTuple):
    """A row's value with its quartiles, or why there is none."""

    name: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None


class Panel(NamedTuple):
    title: str
    bars: list[Bar]


def panels(found: Bench) -> list[Panel]:
    """Return the largest batch, unless one was asked for, the speed, and the peak memory."""
    titles = ["largest batch of a rank", "samples/s", "peak memory of a rank, MiB"]
    shown = [Panel(title, []) for title in titles]
    for row in found.rows:
        for panel, bar in zip(shown, _bars(row), strict=True):
            panel.bars.append(bar)
    return shown if found.settings["batch"] is None else shown[1:]


def _bars(row: Row) -> tuple[Bar, Bar, Bar]:
    if row.status != "measured" or row.samples_per_second is None:
        nothing = Bar(row.name, None, row.outcome)
        return nothing, nothing, nothing
    speed, peak = row.samples_per_second, max(row.peak_memory, default=0) / 2**20
    return (
        Bar(row.name, float(row.batch or 0), str(row.batch)),
        Bar(row.name, speed.median, f"{speed.median:,.1f}", speed.low, speed.high),
        Bar(row.name, peak, f"{peak:,.0f}"),
    )


def lines(name: str, width: int) -> list[str]:
    """Return a strategy's name in lines that are no longer than so many letters where it has a comma to break at."""
    found = [""]
    for part in name.replace(",", ",\0").split("\0"):
        if found[-1] and len(found[-1]) + len(part) > width:
            found.append("")
        found[-1] += part
    return found


_WIDTH, _NAMES, _ROOM = 760, 250, 90
_LINE = 15


def as_svg(panel: Panel) -> str:
    """Return the bars as an element of a page, in the page's own colours."""
    top = max((bar.high or bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
    scale = (_WIDTH - _NAMES - _ROOM) / top
    parts: list[str] = []
    y = 4
    for place, bar in enumerate(panel.bars):
        words = lines(bar.name, 34)
        height = max(len(words) * _LINE, 20)
        parts += _drawn(bar, words, y, height, scale, "#8a8f98" if place == 0 else "#3b82c4")
        y += height + 8
    body = "".join(parts)
    return (
        f'<svg role="img" aria-label="{escaped(panel.title)}" viewBox="0 0 {_WIDTH} {y}" '
        f'style="max-width: {_WIDTH}px" font-family="system-ui, sans-serif" font-size="12.5">{body}</svg>'
    )


def _drawn(bar: Bar, words: list[str], y: float, height: float, scale: float, colour: str) -> Iterator[str]:
    middle = y + height / 2
    first = middle - (len(words) - 1) * _LINE / 2 + 4
    for place, word in enumerate(words):
        yield (
            f'<text x="{_NAMES - 8}" y="{first + place * _LINE:.1f}" text-anchor="end" fill="currentColor">'
            f"{escaped(word)}</text>"
        )
    if bar.value is None:
        yield (
            f'<text x="{_NAMES + 4}" y="{middle + 4:.1f}" fill="currentColor" opacity="0.65">{escaped(bar.text)}</text>'
        )
        return
    end = _NAMES + bar.value * scale
    yield f'<rect x="{_NAMES}" y="{middle - 8:.1f}" width="{end - _NAMES:.1f}" height="16" fill="{colour}"/>'
    right = end
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        left, right = _NAMES + bar.low * scale, max(end, _NAMES + bar.high * scale)
        yield (
            f'<path d="M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 4:.1f}v8M{right:.1f} '
            f'{middle - 4:.1f}v8" '
            'stroke="currentColor" fill="none"/>'
        )
    yield f'<text x="{right + 6:.1f}" y="{middle + 4:.1f}" fill="currentColor">{escaped(bar.text)}</text>'
