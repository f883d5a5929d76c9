"""Plots as inline SVG: text stays text, and what isn't data takes the page's own colour, be it dark or light."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.errors import MissingLibraryError
from shardkit.parity._results import Comparison, Gaps, Parting, Report
from shardkit.parity.outputs import _tables, _words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"
"""Stands for the page's own colour until the picture is SVG."""

_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _GREY = "#3b82c4", "#e07b1a", "#2f9e6e", "#a463c9", "#d64545", "#8a8f98"
_LINES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, "#b08b1e", "#1fa3b5", "#d16ba5", _GREY, "#7a6a53")
_MOST_POINTS = 600
_MOST_COLUMNS = 200
MOST_PARAMETERS = 40
_MOST_LINES = 20
_BEYOND = 1e30
"""What a plot takes for infinite."""
_DECADES = 20
_ROUND_OFF = 2.0**-24
_LEAST = 2.0**-23
"""The least distance that the baseline is taken to have, as where the verdict is made."""


class Plot(NamedTuple):
    """A picture as SVG, and what it shows in a line."""

    svg: str
    caption: str


def _draw(name: str, size: tuple[float, float], fill: Callable[[Figure], None]) -> str:
    """Return the SVG of a figure that ``fill`` draws; ``name`` keeps its inner names apart from those of others.

    Raises:
        MissingLibraryError: matplotlib isn't installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(
            "the HTML report needs matplotlib for its plots, which is not installed: pip install 'shardkit[tools]'"
        ) from error

    ours: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "font.family": "sans-serif",
        "axes.titlesize": 10,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": _INK,
        # A dollar sign in a name is no formula.
        "text.parse_math": False,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "legend.frameon": False,
    }
    with mpl.rc_context(), warnings.catch_warnings():
        # The reader's browser has the letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(ours)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        fill(figure)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return _inline(file.getvalue(), size[0])


def _inline(svg: str, inches: float) -> str:
    """Return an SVG document as an element of a page, that is as wide as the page where it has 10.5 inches."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    # In a page, names of XML need no declaration; without them it holds no address at all.
    head = re.sub(r' xmlns(:\w+)?="[^"]*"', "", head).replace(
        "<svg ", f'<svg role="img" style="max-width: {6.6 * inches:.1f}rem" '
    )
    svg = f"{head}>{rest}".replace(_INK, "currentColor")
    used = set(re.findall(r"#([\w.-]+)[\")]", svg))
    return re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)


def label(text: str, most: int = 40) -> str:
    """Return a name on one line, its middle left out where it is long."""
    shown = _words.line(text)
    if len(shown) <= most:
        return shown
    kept = (most - 3) // 2
    return f"{shown[:kept]}...{shown[len(shown) - kept :]}"


def _wrapped(text: str) -> str:
    return _words.packed(label(text, 72), 30)


def thinned(values: Sequence[float], most: int = _MOST_POINTS) -> list[int]:
    """Return the places of at most ``most`` values: of each of even stretches the least and the greatest."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = most // 2
    kept: set[int] = set()
    for part in range(stretches):
        places = range(part * len(values) // stretches, (part + 1) * len(values) // stretches)
        odd = next((place for place in places if not math.isfinite(values[place])), None)
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)} if odd is None else {odd}
    return sorted(kept)


def _steps(axes: Axes, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set_xlim(0.5 if last <= 50 else 1 - 0.01 * last, last + (0.5 if last <= 50 else 0.01 * last))
    axes.set_xlabel("step")
    axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)


def _curve(axes: Axes, values: Sequence[float], **how: Any) -> None:
    places = thinned(values)
    shown = [values[place] if abs(values[place]) < _BEYOND else math.nan for place in places]
    marker = "." if len(places) <= 40 else ""
    axes.plot([place + 1 for place in places], shown, marker=marker, markersize=5, linewidth=1.5, **how)


def _loss_axis(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    found = [abs(value) for curve in curves for value in curve if abs(value) < _BEYOND]
    lost = sum(not abs(value) < _BEYOND for curve in curves for value in curve)
    least = min((value for curve in curves for value in curve if abs(value) < _BEYOND), default=0.0)
    if found and least > 0 and max(found) > 1000 * least:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        axes.set_yscale("log")
        low, high = math.floor(math.log10(least)), math.ceil(math.log10(max(found)))
        stride = 1 + (high - low) // 8
        axes.yaxis.set_major_locator(FixedLocator([10.0**power for power in range(low, high + 1, stride)]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("loss" + (f" ({_words.count(lost, 'value')} not finite)" if lost else ""), loc="left")


def _marks(axes: Axes, found: Comparison) -> None:
    """Draw where the first bit differs and where the runs part."""
    first, parting = found.first_bit, found.parting
    together = first is not None and parting is not None and first.step == parting.step
    marks: list[tuple[Parting | None, str, Any]] = [
        (None if together else first, "first bit", (0, (1, 2))),
        (parting, "first bit, they part" if together else "they part", (0, (4, 2))),
    ]
    for mark, text, dashes in marks:
        if mark is not None:
            axes.axvline(mark.step, color=_INK, alpha=0.6, linewidth=1, linestyle=dashes, label=text)


def curves(name: str, found: Comparison, names: tuple[str, str]) -> Plot | None:
    """Draw the losses of two runs and the gaps between them."""
    last = max(len(found.loss_a), len(found.loss_b))
    if not last:
        return None
    gaps = found.gaps if found.verdict != "identical" else None

    def fill(figure: Figure) -> None:
        left, *right = figure.subplots(1, 1 if gaps is None else 2, squeeze=False)[0]
        _curve(left, found.loss_a, color=_BLUE, label=names[0])
        _curve(left, found.loss_b, color=_ORANGE, label=names[1], linestyle=(0, (4, 2)))
        _loss_axis(left, (found.loss_a, found.loss_b))
        _steps(left, last)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        if gaps is not None:
            _gaps(right[0], gaps, found)

    size = (10.5, 3.6) if gaps is not None else (5.25, 3.6)
    told = f"Losses of {names[0]} and {names[1]}" + ("" if gaps is None else "; right, how far they lie apart")
    return Plot(_draw(name, size, fill), f"{told}, by step.")


def _gaps(axes: Axes, gaps: Gaps, found: Comparison) -> None:
    series = [
        ("loss", gaps.loss, _BLUE, "o"),
        ("gradients", gaps.gradients, _GREEN, "s"),
        ("weights", gaps.weights, _PURPLE, "^"),
    ]
    scale = _Scale.of([value for _, values, _, _ in series for value in values])
    axes.set_yscale("log")
    for name, values, colour, marker in series:
        places = thinned([value if math.isfinite(value) else math.inf for value in values])
        heights = [scale.place(values[place]) for place in places]
        few: dict[str, Any] = {"marker": marker, "markersize": 3.5} if len(places) <= 40 else {}
        axes.plot([place + 1 for place in places], heights, color=colour, linewidth=1.3, label=name, **few)
    _marks(axes, found)
    if scale.low < _ROUND_OFF < scale.high:
        axes.axhline(_ROUND_OFF, color=_GREY, linewidth=1, linestyle=(0, (2, 2)), label="float32 round-off (6e-8)")
    scale.dress(axes)
    axes.set_title("gap, relative (log axis)", loc="left")
    _steps(axes, max((len(values) for _, values, _, _ in series), default=1) or 1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, columnspacing=1.2)


class _Scale(NamedTuple):
    """A log axis with a place for exact zeros below, and one above for what isn't finite."""

    low: float
    high: float
    zeros: bool
    lost: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        lost = any(not abs(value) < _BEYOND for value in values)
        positive = [abs(value) for value in values if 0 < abs(value) < _BEYOND]
        if not positive:
            return cls(1e-9, 1.0, any(value == 0 for value in values), lost)
        high = math.floor(math.log10(max(positive))) + 1
        low = max(math.floor(math.log10(min(positive))), high - _DECADES)
        return cls(10.0 ** min(low, high - 2), 10.0**high, any(value == 0 for value in values), lost)

    @property
    def _zero(self) -> float:
        return self.low * math.pow(self.low / self.high, 0.12)

    @property
    def _lost(self) -> float:
        return self.high * math.pow(self.high / self.low, 0.12)

    def place(self, value: float) -> float:
        if value == 0:
            return self._zero
        return max(abs(value), self.low) if abs(value) < _BEYOND else self._lost

    def dress(self, axes: Axes) -> None:
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

        low, high = round(math.log10(self.low)), round(math.log10(self.high))
        stride = 1 + (high - low - 1) // 7
        ticks = [(10.0**power, f"1e{power:+03d}" if power else "1") for power in range(high, low - 1, -stride)][::-1]
        if self.zeros:
            ticks.insert(0, (self._zero, "exactly 0"))
        if self.lost:
            ticks.append((self._lost, "not finite"))
        axes.yaxis.set_major_locator(FixedLocator([height for height, _ in ticks]))
        axes.yaxis.set_major_formatter(FixedFormatter([text for _, text in ticks]))
        axes.yaxis.set_minor_locator(NullLocator())
        margin = (self.high / self.low) ** 0.06
        bottom, top = (self._zero if self.zeros else self.low), (self._lost if self.lost else self.high)
        axes.set_ylim(bottom / margin, top * margin)


def heat(name: str, found: Comparison) -> Plot | None:
    """Draw the gap of each parameter's weights over the steps, the most different first; None if there is none."""
    gaps = found.gaps
    if gaps is None or not any(value != 0 for row in gaps.parameter_weights for value in row):
        return None

    def worst(row: Sequence[float]) -> float:
        return max((value if abs(value) < _BEYOND else math.inf for value in row), default=0.0)

    rows = sorted(zip(gaps.names, gaps.parameter_weights, strict=True), key=lambda item: -worst(item[1]))
    shown = rows[:MOST_PARAMETERS]
    steps = max(len(row) for _, row in shown)
    scale = _Scale.of([value for _, row in shown for value in row])

    def fill(figure: Figure) -> None:
        import numpy as np
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm
        from matplotlib.patches import Patch
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

        # From blue to yellow by way of green: readable without colours, too, and on dark as on light.
        colours = colormaps["viridis"].with_extremes(under="#9aa0a833", over=_RED, bad=_RED)
        cells = np.array([_columns(row, steps, scale) for _, row in shown])
        norm = LogNorm(scale.low, scale.high)
        axes = figure.subplots()
        axes.imshow(
            colours(norm(cells)),
            aspect="auto",
            interpolation="nearest",
            extent=(0.5, steps + 0.5, len(shown) - 0.5, -0.5),
        )
        _steps(axes, steps)
        axes.grid(visible=False)
        axes.set_xlim(0.5, steps + 0.5)
        axes.set_yticks(range(len(shown)), [label(parameter, 56) for parameter, _ in shown], fontsize=7.5)
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.01, fraction=0.04, aspect=25)
        bar.set_label("gap of the weights, relative")
        low, high = round(math.log10(scale.low)), round(math.log10(scale.high))
        powers = range(low, high + 1, 1 + (high - low - 1) // 7)
        bar.ax.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
        bar.ax.yaxis.set_major_formatter(FixedFormatter([f"1e{power:+03d}" if power else "1" for power in powers]))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        extra = [Patch(facecolor="#9aa0a833", edgecolor=_GREY, label="exactly 0")] if scale.zeros else []
        extra += [Patch(facecolor=_RED, label="not finite")] if scale.lost else []
        if extra:
            figure.legend(handles=extra, loc="outside lower right", ncols=2)

    most = f"the {len(shown)} most different of {len(rows)} parameters" if len(shown) < len(rows) else "all parameters"
    told = f"How far each parameter's weights lie apart after each step, relative, in colours on a log scale; {most}."
    if steps > _MOST_COLUMNS:
        told += f" A column is the largest of about {round(steps / _MOST_COLUMNS)} steps."
    return Plot(_draw(name, (10.5, 1.5 + 0.19 * max(len(shown), 3)), fill), told)


def _columns(row: Sequence[float], steps: int, scale: _Scale) -> list[float]:
    """Return the largest values of even stretches of a row: zeros below the scale, what isn't finite above it."""
    values = [value if abs(value) < _BEYOND else math.inf for value in row] + [0.0] * (steps - len(row))
    amount = min(steps, _MOST_COLUMNS)
    held = [max(values[part * steps // amount : (part + 1) * steps // amount]) for part in range(amount)]
    return [
        scale.low / 10 if value == 0 else scale.high * 10 if math.isinf(value) else max(value, scale.low)
        for value in held
    ]


def losses(name: str, report: Report) -> Plot | None:
    """Draw the losses of all strategies in one picture; of both sides, those before solid, those after dashed."""
    found: list[tuple[str, list[float], list[float]]] = []
    for side in report.sides[:1]:
        if _words.losses_of(side.baseline):
            found.append(("baseline", _words.losses_of(side.baseline), []))
    for row in report.rows:
        compared = row.comparison
        two = row.after is not None
        if two and any(held is not None and held.failure is not None for held in (row.before, row.after)):
            continue
        before = _words.losses_of(row.before) or (compared.loss_a if compared is not None and two else [])
        after = _words.losses_of(row.after) or (compared.loss_b if compared is not None and two else [])
        if before or after:
            found.append((_words.strategy(row), before, after))
    left = len(found) - _MOST_LINES
    found = found[:_MOST_LINES]
    if not found:
        return None

    def fill(figure: Figure) -> None:
        from matplotlib.lines import Line2D

        axes = figure.subplots()
        handles = []
        drawn = [curve for _, before, after in found for curve in (before, after) if curve]
        for place, (strategy, before, after) in enumerate(found):
            colour = _GREY if strategy == "baseline" else _LINES[place % len(_LINES)]
            # Curves that agree lie on each other: the earlier ones are the wider.
            width = 1.2 + 5.0 * (len(found) - 1 - place) / max(len(found) - 1, 1)
            for curve, style in ((before, "solid"), (after, (0, (1.5, 1.5)))):
                places = thinned(curve)
                shown = [curve[at] if abs(curve[at]) < _BEYOND else math.nan for at in places]
                how: dict[str, Any] = {"solid_capstyle": "butt"} if style == "solid" else {"dash_capstyle": "butt"}
                lone = "o" if len(places) == 1 else ""
                axes.plot([at + 1 for at in places], shown, color=colour, linewidth=width, linestyle=style,
                          marker=lone, alpha=0.85, **how)  # fmt: skip
            handles.append(Line2D([], [], color=colour, linewidth=3, label=_wrapped(strategy)))
        if any(after for *_, after in found):
            handles.append(Line2D([], [], color=_INK, linestyle="solid", label="before"))
            handles.append(Line2D([], [], color=_INK, linestyle=(0, (1.5, 1.5)), label="after"))
        _loss_axis(axes, drawn)
        _steps(axes, max(len(curve) for curve in drawn))
        figure.legend(handles=handles, loc="outside right upper", fontsize=8)

    told = "Losses of all strategies, by step; those that agree lie on each other, the later ones thinner."
    if left > 0:
        told += f" {_words.count(left, 'strategy').replace('strategys', 'strategies')} more are left out."
    return Plot(_draw(name, (10.5, max(3.4, 0.5 + 0.17 * _heights(name for name, *_ in found))), fill), told)


def _heights(names: Iterator[str]) -> int:
    return sum(_wrapped(name).count("\n") + 1 for name in names)


def distances(name: str, report: Report) -> Plot | None:
    """Draw each strategy's distances from float64, beside the baseline's and what the factor allows of it."""
    baseline = report.sides[0].baseline if report.sides else None
    base = baseline.distances if baseline is not None else None
    shown = [(_words.strategy(row), row.before.distances) for row in report.rows]
    rows = [(strategy, held) for strategy, held in shown if held is not None]
    if not rows:
        return None
    factor = report.settings.get("factor")

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, 3, sharey=True)
        fields = (("loss", "loss"), ("gradient_norm", "gradient norm"), ("weights", "weights"))
        for axes, (field, heading) in zip(panels, fields, strict=True):
            values = [getattr(held, field) for _, held in rows]
            own = getattr(base, field) if base is not None else None
            scale = _Scale.of([*values, *([] if own is None else [own])])
            if own is not None and own >= 0 and isinstance(factor, int | float):
                axes.axvspan(1e-300, max(own, _LEAST) * factor, color=_GREEN, alpha=0.12, linewidth=0)
            if own is not None:
                axes.axvline(scale.place(own), color=_GREY, linewidth=1.5)
            axes.set_xscale("log")
            axes.plot([scale.place(value) for value in values], range(len(rows)), "o", color=_BLUE, markersize=6)
            _dress_across(axes, scale)
            axes.set_title(heading, loc="left")
            axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
            axes.set_yticks(range(len(rows)), [_wrapped(strategy) for strategy, _ in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)

    height = 0.9 + 0.22 * (_heights(strategy for strategy, _ in rows) + 0.4 * len(rows))
    told = "Distances from float64, relative, on log axes; the grey line is the baseline's own"
    told += f", the green ground what is at parity: up to {factor} times that." if factor is not None else "."
    return Plot(_draw(name, (10.5, max(1.7, height)), fill), told)


def _dress_across(axes: Axes, scale: _Scale) -> None:
    """Dress the horizontal axis as :meth:`_Scale.dress` does the vertical one."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    low, high = round(math.log10(scale.low)), round(math.log10(scale.high))
    ticks = [(10.0**power, f"1e{power:+03d}") for power in range(high, low - 1, -(1 + (high - low - 1) // 4))][::-1]
    ends = ([(scale.place(0.0), "0")] if scale.zeros else []) + ([(scale.place(math.inf), "inf")] if scale.lost else [])
    # What stands beside an end's label leaves it its room.
    near = (scale.high / scale.low) ** 0.25
    ticks = [tick for tick in ticks if all(max(tick[0] / end, end / tick[0]) > near for end, _ in ends)] + ends
    axes.xaxis.set_major_locator(FixedLocator([place for place, _ in ticks]))
    axes.xaxis.set_major_formatter(FixedFormatter([text for _, text in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    margin = (scale.high / scale.low) ** 0.06
    left = scale.place(0.0) if scale.zeros else scale.low
    axes.set_xlim(left / margin, (scale.place(math.inf) if scale.lost else scale.high) * margin)


def bars(name: str, report: Report) -> Plot | None:
    """Draw speed and memory of each strategy, before and after."""
    found: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for what, side, measured in _tables.all_measured(report):
        if measured.failure is None and (measured.samples_per_second is not None or measured.peak_memory):
            found.setdefault(what, {})[side] = (measured.samples_per_second, _words.mebibytes(measured))
    names = list(dict.fromkeys(side for held in found.values() for side in held))
    if not any(number is not None for held in found.values() for pair in held.values() for number in pair):
        return None

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        thick = 0.8 / len(names)
        for axes, place, heading in zip(panels, (0, 1), ("samples/s", "peak memory of a rank, MiB"), strict=True):
            for at, side in enumerate(names):
                values = [held[side][place] if side in held else None for held in found.values()]
                heights = [row + (at - (len(names) - 1) / 2) * thick for row in range(len(found))]
                kept = [(height, value) for height, value in zip(heights, values, strict=True) if value is not None]
                kept = [(height, value) for height, value in kept if abs(value) < _BEYOND]
                drawn = axes.barh(
                    [height for height, _ in kept],
                    [value for _, value in kept],
                    height=0.9 * thick,
                    color=(_BLUE, _ORANGE)[at % 2],
                    label=label(side),
                )
                axes.bar_label(drawn, labels=[f"{value:.1f}" for _, value in kept], padding=3, fontsize=8)
            axes.margins(x=0.14)
            axes.set_title(heading, loc="left")
            axes.set_yticks(range(len(found)), [_wrapped(what) for what in found])
            axes.set_ylim(len(found) - 0.5, -0.5)
            axes.grid(visible=False)
        if len(names) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)

    # Each label has its lines' room, and each bar its number's.
    room = max(0.16 * len(names), *(0.15 * (1 + _wrapped(what).count("\n")) for what in found)) + 0.08
    told = "Samples per second of all ranks, and the peak memory of the rank that took most."
    return Plot(_draw(name, (10.5, 1.0 + room * len(found)), fill), told)
