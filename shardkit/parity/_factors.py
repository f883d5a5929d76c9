"""What a constant factor between two runs stands for."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardkit.parity._case import Case
from shardkit.parity._comparable import accumulations, world_sizes

_SAME = 1e-3
"""How far a factor may be from the number that it is taken for."""


class Reading(NamedTuple):
    """A name of a diagnosis, and the factor in words."""

    name: str
    words: str


def readings(case: Case, factor: float) -> list[Reading]:
    """Return what a factor may be: of the world size, of the accumulation, of both."""
    found = []
    worlds, counts = sorted(world_sizes(case.pair)), sorted(accumulations(case.pair))
    for size in worlds:
        for value, words in _powers(size, "the world size"):
            found.append((value, Reading("world size", words)))
    for count in counts:
        for value, words in _powers(count, "the number of micro-batches")[:2]:
            found.append((value, Reading("accumulation", words)))
    exact = [reading for value, reading in found if is_about(factor, value)]
    if exact:
        return list(dict.fromkeys(exact))
    for size in worlds:
        for count in counts:
            words = f"the world size, {size}, times the number of micro-batches, {count}"
            for value, text in ((size * count, words), (1 / (size * count), f"one over {words}")):
                if is_about(factor, value):
                    return [Reading("world size", text), Reading("accumulation", text)]
    return []


def is_about(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=_SAME)


def rounded(value: float) -> float:
    """Return a number as it is told: to six digits."""
    return float(f"{value:.6g}")


def _powers(size: int, what: str) -> list[tuple[float, str]]:
    return [
        (float(size), f"{what}, {size}"),
        (1 / size, f"one over {what}, 1/{size}"),
        (size**0.5, f"the square root of {what}, sqrt({size})"),
        (size**-0.5, f"one over the square root of {what}, 1/sqrt({size})"),
    ]
