"""The search for the largest size, over peaks that are computed: no process runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from shardkit.bench._search import Search

MIB = 2**20
CASES = 1500


class Machine:
    """A budget, and peaks that are the largest of several sums which each grow by so much a sample, and their noise."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        growth = 0.0
        while growth < 2 * MIB:  # or the noise decides
            model = draw.uniform(5, 3000) * MIB
            self.parts = [(model, draw.uniform(0, 0.1) * MIB)]
            for _ in range(draw.choice([1, 2, 2, 3])):
                sample = math.exp(draw.uniform(math.log(0.3), math.log(200))) * MIB
                self.parts.append((model * draw.uniform(0.2, 1.0), sample))
            answer = round(math.exp(draw.uniform(0, math.log(draw.choice([30, 100, 1000])))))
            growth = self.peak(answer + 1) - self.peak(answer)
        self.budget = self.peak(answer) + draw.uniform(0.0, 1.0) * growth

    def peak(self, size: int, wrong: list[tuple[float, float]] | None = None) -> float:
        wrong = wrong or [(1.0, 1.0)] * len(self.parts)
        return max(
            base * less + growth * more * size for (base, growth), (less, more) in zip(self.parts, wrong, strict=True)
        )

    def estimate(self, error: float) -> Callable[[int], float]:
        """Return an estimate of which each part is wrong by up to this much, one more than the other."""
        low, high = 1 - error, 1 + error
        wrong = [(self.random.uniform(low, high), self.random.uniform(low, high)) for _ in self.parts]
        return lambda size: self.peak(size, wrong)

    def search(self, sizes: range | list[int], estimate: Callable[[int], float] | None) -> dict[int, bool]:
        """Return what came of each size that was tried, once the search has ended with an answer that was shown."""
        search = Search(sizes, round(self.budget), estimate)
        tried: dict[int, bool] = {}
        while (size := search.next()) is not None:
            assert size not in tried
            assert size in sizes
            noise = self.random.uniform(-1, 1) * MIB
            tried[size] = self.peak(size) + 0.3 * noise <= self.budget
            if tried[size]:
                search.fitted(size, self.peak(size) + noise)
            else:
                search.failed(size)
        found = search.largest
        if found is None:
            assert tried[sizes[0]] is False
        else:
            place = sizes.index(found)
            assert tried[found]
            assert place == len(sizes) - 1 or tried[sizes[place + 1]] is False
        return tried


def trials(estimate: Callable[[Machine], Callable[[int], float] | None]) -> list[int]:
    """Return how many trials each search took, ascending; each must end with an answer that its trials show."""
    machines = [Machine(seed) for seed in range(CASES)]
    return sorted(len(machine.search(range(1, 2**20), estimate(machine))) for machine in machines)


def part_within(counts: list[int], most: int) -> float:
    return sum(count <= most for count in counts) / len(counts)


def test_a_right_estimate_takes_at_most_six_trials_whatever_the_noise() -> None:
    counts = trials(lambda machine: machine.peak)
    assert counts[-1] <= 6
    assert part_within(counts, 4) > 0.9


@pytest.mark.parametrize("factor", [0.9, 0.95, 1.05, 1.1])
def test_an_estimate_that_is_off_by_up_to_a_tenth_takes_six_trials(factor: float) -> None:
    counts = trials(lambda machine: lambda size: factor * machine.peak(size))
    assert part_within(counts, 6) > 0.99
    assert counts[-1] <= 8


def test_an_estimate_of_which_each_part_is_off_by_up_to_a_tenth_mostly_takes_six_trials() -> None:
    counts = trials(lambda machine: machine.estimate(0.1))
    assert part_within(counts, 6) > 0.95


def test_an_estimate_that_is_off_by_thirty_percent_mostly_takes_six_trials() -> None:
    counts = trials(lambda machine: machine.estimate(0.3))
    assert part_within(counts, 6) > 0.87


def test_without_an_estimate_the_trials_are_few() -> None:
    counts = trials(lambda machine: None)
    assert part_within(counts, 6) > 0.7
    assert part_within(counts, 10) > 0.97


def test_a_senseless_estimate_changes_the_number_of_trials_and_not_the_answer() -> None:
    for estimate in (lambda size: 1, lambda size: 2**60, lambda size: size, lambda size: 2**40 // size):
        for seed in range(100):
            assert len(Machine(seed).search(range(1, 2**20), estimate)) < 70


def test_the_sizes_may_be_few_and_far_apart() -> None:
    divisors = [size for size in range(1, 5041) if 5040 % size == 0]
    for seed in range(300):
        machine = Machine(seed)
        for estimate in (None, machine.peak, machine.estimate(0.3)):
            tried = machine.search(divisors, estimate)
            assert set(tried) <= set(divisors)
            assert len(tried) <= 12


def test_all_sizes_may_fit_and_none() -> None:
    all_fit = Search(range(1, 9), 1000 * MIB)
    tried = []
    while (size := all_fit.next()) is not None:
        tried.append(size)
        all_fit.fitted(size, size * MIB)
    assert all_fit.largest == 8 == tried[-1]
    none = Search(range(1, 9), MIB, lambda size: 4 * MIB)
    assert none.next() == 1
    none.failed(1)
    assert none.next() is None
    assert none.largest is None
