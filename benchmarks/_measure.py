"""How figures are taken and told: blocks of steps side by side, quartiles, and tables of what came out."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import shardkit

STRATEGIES = [variant.strategy for backend in shardkit.backends().values() for variant in backend.variants_on("cpu")]
"""All ways to ask for an installed backend, as the backends themselves declare them."""

needs_peers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("accelerate", "lightning_fabric")),
    reason='the peers are not installed: pip install "shardkit[peers]"',
)


@dataclass(frozen=True)
class Quartiles:
    """The middle half of repeated figures."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the quartiles of these figures; of a single one, that one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, form: str = ".3f", *, unit: float = 1) -> str:
        """Return median and quartiles in words, each divided by the unit."""
        low, median, high = (format(value / unit, form) for value in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


def interleave(
    steps: Mapping[str, Callable[[], None]],
    *,
    blocks: int,
    length: int,
    before: Callable[[str], None] = lambda name: None,
    barrier: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run blocks of ``length`` steps, arm after arm, round after round; return seconds per step, by arm and round.

    What slows the machine for a while so slows all arms of a round alike. ``before`` gets an arm ready, untimed.
    """
    for name, step in steps.items():
        before(name)
        for _ in range(max(length // 10, 2)):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()
    for _ in range(blocks):
        for name, step in steps.items():
            before(name)
            barrier()
            start = clock()
            for _ in range(length):
                step()
            barrier()
            seconds[name].append((clock() - start) / length)
    return seconds


def differences(arm: Sequence[float], control: Sequence[float]) -> Quartiles:
    """Return the quartiles of what an arm takes more than the control of the same round."""
    return Quartiles.of([a - b for a, b in zip(arm, control, strict=True)])


def ratios(arm: Sequence[float], control: Sequence[float]) -> Quartiles:
    """Return the quartiles of what an arm takes over the control of the same round."""
    return Quartiles.of([a / b for a, b in zip(arm, control, strict=True)])


class _Clock:
    """A clock that goes by the seconds that were measured elsewhere, for pytest-benchmark to read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


_clock = _Clock()

replayed = pytest.mark.benchmark(timer=_clock)
"""Marks a benchmark whose rounds were measured side by side with others, and are handed in by :func:`report`."""


def report(benchmark: Any, seconds: Sequence[float], **figures: Any) -> None:
    """Hand measured rounds to pytest-benchmark, and figures to its ``extra_info``."""
    rounds = iter(seconds)

    def advance() -> None:
        _clock.now += next(rounds, 0.0)

    for name, value in figures.items():
        if isinstance(value, Quartiles):
            value = {"low": value.low, "median": value.median, "high": value.high}
        benchmark.extra_info[name] = value
    benchmark.pedantic(advance, rounds=len(seconds))


@dataclass
class Table:
    """Rows to print when all is done."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [
            f"### {self.title}",
            "",
            _row([column.replace("_", " ") for column in self.columns]),
            _row(("---",) * len(self.columns)),
        ]
        return "\n".join([*lines, *map(_row, self.rows), ""])


tables: dict[str, Table] = {}


def tell(title: str, **cells: str) -> None:
    """Add a row to the table of this title; its columns are those of its first row."""
    table = tables.setdefault(title, Table(title, tuple(cells), []))
    table.rows.append(tuple(cells.values()))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
