"""A benchmark as a picture, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from shardkit.bench._results import Bench
from shardkit.bench.outputs import _bars, _words
from shardkit.errors import MissingLibraryError


def draw(found: Bench, path: Path) -> None:
    """Draw the largest batch, the speed with its quartiles, and the peak memory of each row.

    Raises:
        MissingLibraryError: matplotlib isn't installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(
            "PNG plots need matplotlib, which is not installed: pip install 'shardkit[tools]'"
        ) from error

    panels = _bars.panels(found)
    names = ["\n".join(_bars.lines(bar.name, 34)) for bar in panels[0].bars]
    room = sum(0.16 * (1 + name.count("\n")) + 0.22 for name in names)
    figure = Figure(figsize=(3.2 + 3.4 * len(panels), 1.3 + room), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_words.title(found), parse_math=False)
    places = range(len(names))
    for place, (axes, panel) in enumerate(zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True)):
        values = [bar.value or 0.0 for bar in panel.bars]
        axes.barh(places, values, height=0.65, color=["#8a8f98", *["#3b82c4"] * (len(names) - 1)])
        top = max((bar.high or bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
        for row, bar in enumerate(panel.bars):
            end = bar.value or 0.0
            if bar.value is not None and bar.low is not None and bar.high is not None:
                end = max(bar.high, bar.value)
                axes.errorbar(
                    bar.value,
                    row,
                    xerr=[[bar.value - bar.low], [end - bar.value]],
                    color="black",
                    linewidth=0.8,
                    capsize=2,
                )
            grey = {} if bar.value is not None else {"color": "0.4"}
            axes.annotate(
                bar.text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, **grey
            )
        axes.set(title=panel.title, xlim=(0, 1.22 * top))
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 0:
            axes.set_yticks(places, names, fontsize=8, parse_math=False)
            axes.invert_yaxis()
    figure.savefig(path)
