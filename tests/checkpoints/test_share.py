"""Who writes what: every element once, by a rank that holds it, and the common load evenly."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shardkit.checkpoints._share import divide
from shardkit.errors import CheckpointError


def written(shares: list[list[tuple[str, int, int]]], sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return for each element of each tensor how often it is written."""
    counts = {name: [0] * size for name, size in sizes.items()}
    for share in shares:
        for name, start, end in share:
            for element in range(start, end):
                counts[name][element] += 1
    return counts


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_written_once_by_a_rank_that_holds_it(seed: int) -> None:
    draw = random.Random(seed)
    world = draw.randint(1, 5)
    sizes = {f"t{index}": draw.choice([0, 1, 2, 7, 50]) for index in range(8)}
    held: list[dict[str, list[tuple[int, int]]]] = [{} for _ in range(world)]
    for name, size in sizes.items():
        if draw.random() < 0.4:
            for own in held:
                own[name] = [(0, size)]
            continue
        cuts = sorted({0, size, *(draw.randint(0, size) for _ in range(3))})
        for start, end in pairwise(cuts):
            for rank in draw.sample(range(world), draw.randint(1, world)):
                held[rank].setdefault(name, []).append((start, end))
    shares = divide(sizes, dict.fromkeys(sizes, 4), held)
    assert all(count == 1 for counts in written(shares, sizes).values() for count in counts)
    for share, own in zip(shares, held, strict=True):
        for name, start, end in share:
            assert any(first <= start and end <= last for first, last in own[name])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_what_all_hold_is_divided_to_within_one_element(world: int) -> None:
    sizes = {"a": 1000, "b": 3, "c": 517}
    widths = {"a": 4, "b": 8, "c": 2}
    shares = divide(sizes, widths, [{name: [(0, size)] for name, size in sizes.items()}] * world)
    loads = [sum((end - start) * widths[name] for name, start, end in share) for share in shares]
    assert max(loads) - min(loads) <= 2 * 8
    assert sum(loads) == 1000 * 4 + 3 * 8 + 517 * 2


def test_elements_that_no_rank_holds_are_named() -> None:
    with pytest.raises(CheckpointError, match="no rank holds elements 2 to 5 of 'w'"):
        divide({"w": 8}, {"w": 4}, [{"w": [(0, 2)]}, {"w": [(5, 8)]}])
