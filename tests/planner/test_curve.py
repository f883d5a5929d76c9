"""Profiles between those that were run, and the largest batch that fits, against trying every batch."""

from __future__ import annotations

import pytest

from shardkit.planner._curve import Curve
from shardkit.planner._profile import Event, Profile

MIB = 2**20


class Model:
    """Peaks that are the most of several lines, as those of a training are."""

    def __init__(self, *lines: tuple[int, int]) -> None:
        self.lines = lines
        self.runs = 0

    def profile(self, batch: int) -> Profile:
        self.runs += 1
        return Profile(batch, (Event("forward", (), 0, 0, self.peak(batch)),), 0)

    def peak(self, batch: int) -> int:
        return max(fixed + each * batch for fixed, each in self.lines)


def high(profile: Profile) -> int:
    return profile.events[0].high


@pytest.mark.parametrize(
    "lines",
    [
        [(0, 3 * MIB)],
        [(500 * MIB, MIB), (0, 60 * MIB)],
        [(900 * MIB, 0), (300 * MIB, 7 * MIB), (10 * MIB, 9 * MIB)],
        [(1024 * MIB - 1, 1)],
    ],
)
def test_the_largest_batch_is_the_one_that_trying_all_finds(lines: list[tuple[int, int]]) -> None:
    model, limit = Model(*lines), 1024 * MIB
    right = next(batch for batch in range(1, 10**6) if model.peak(batch + 1) > limit)
    assert Curve(model.profile).largest(high, limit) == right


def test_the_passes_are_run_few_times() -> None:
    model = Model((500 * MIB, MIB), (0, 60 * MIB))
    curve = Curve(model.profile)
    for limit in range(600, 1600, 100):
        curve.largest(high, limit * MIB)
    assert model.runs <= 9


def test_between_two_batches_a_figure_lies_on_their_line() -> None:
    curve = Curve(Model((100, 10)).profile)
    assert high(curve.near(1000)) == 100 + 10 * 1000
    curve.exactly(1000)
    assert high(curve.near(501)) == 100 + 10 * 501


def test_passes_that_differ_in_what_happens_are_never_mixed() -> None:
    def run(batch: int) -> Profile:
        kinds = ("forward",) if batch < 3 else ("forward", "backward")
        return Profile(batch, tuple(Event(kind, (), 0, 0, 7 * batch) for kind in kinds), 0)

    curve = Curve(run)
    curve.exactly(10)
    assert curve.near(6) == run(6)


def test_a_batch_whose_data_are_too_large_is_not_made() -> None:
    asked = []

    def run(batch: int) -> Profile:
        asked.append(batch)
        return Profile(batch, (Event("forward", (), 0, 0, 8 * MIB * batch),), 8 * MIB * batch)

    assert Curve(run).largest(high, 2**40) == 2**40 // (8 * MIB)
    assert max(asked) <= 64
