"""Who writes what: every element once, by a rank that holds it; what several hold is divided among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardkit.errors import CheckpointError

Run = tuple[int, int]
"""Elements from the first number to below the second."""


class Part(NamedTuple):
    """A run of a tensor's elements: from ``start`` to below ``end``."""

    name: str
    start: int
    end: int


def divide(
    sizes: Mapping[str, int], widths: Mapping[str, int], held: Sequence[Mapping[str, Sequence[Run]]]
) -> list[list[Part]]:
    """Return what each rank writes, the same on every rank that asks.

    ``sizes`` gives the elements of each tensor, ``widths`` the bytes of one, ``held`` the runs that each rank holds.

    Raises:
        CheckpointError: no rank holds some elements.
    """
    shares: list[list[Part]] = [[] for _ in held]
    loads = [0] * len(held)
    common: list[str] = []
    for name, size in sizes.items():
        whole = [(0, size)]
        runs = [list(rank.get(name, ())) for rank in held]
        if all(own == whole for own in runs):
            common.append(name)
            continue
        for start, end, holders in _segments(name, size, runs):
            rank = min(holders, key=lambda rank: loads[rank])
            loads[rank] += (end - start) * widths[name]
            shares[rank].append(Part(name, start, end))
    _divide_common(common, sizes, widths, shares)
    return [[part for part in share if part.end > part.start] for share in shares]


def _segments(name: str, size: int, runs: list[list[Run]]) -> list[tuple[int, int, list[int]]]:
    """Return runs that make up a tensor, each with the ranks that hold all of it."""
    listed = sorted((start, end, rank) for rank, own in enumerate(runs) for start, end in own if end > start)
    cuts = sorted({0, size, *(start for start, _, _ in listed), *(end for _, end, _ in listed)})
    found = []
    active: list[tuple[int, int, int]] = []
    following = 0
    for start, end in pairwise(cuts):
        while following < len(listed) and listed[following][0] <= start:
            active.append(listed[following])
            following += 1
        active = [run for run in active if run[1] > start]
        if not active:
            raise CheckpointError(f"no rank holds elements {start} to {end} of {name!r}: its backend lost them")
        found.append((start, end, sorted({rank for _, _, rank in active})))
    return found


def _divide_common(
    names: list[str], sizes: Mapping[str, int], widths: Mapping[str, int], shares: list[list[Part]]
) -> None:
    """Give each rank an equal part of the bytes that all hold, one after another."""
    total = sum(sizes[name] * widths[name] for name in names)
    before, rank = 0, 0
    for name in names:
        start = 0
        while start < sizes[name]:
            limit = total * (rank + 1) // len(shares)
            room = max(limit - before, 0) // widths[name]
            if room == 0 and rank < len(shares) - 1:
                rank += 1
                continue
            end = sizes[name] if rank == len(shares) - 1 else min(start + room, sizes[name])
            shares[rank].append(Part(name, start, end))
            before += (end - start) * widths[name]
            start = end
