"""Sketches are linear, add up over parts, and tell norms; fingerprints know samples, not how they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardkit.parity._batch import fingerprint
from shardkit.parity._sketch import ELEMENTS, SQUARE, SUMS, Run, Sketcher, norm_of_sums, places, sketch

SIZES = [1, 5, 16, 1000, 2**16, 2**16 + 3, 300_000]


def drawn(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_a_sketch_is_linear(size: int) -> None:
    one, two = drawn(size).double(), drawn(size, 1).double()
    combined = sketch(3 * one - 2 * two)
    apart = 3 * sketch(one) - 2 * sketch(two)
    scale = float(combined[SQUARE].sqrt())
    assert (combined[SUMS] - apart[SUMS]).abs().max() < 1e-12 * scale
    assert (combined[ELEMENTS] - apart[ELEMENTS]).abs().max() < 1e-14 * scale


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_the_sketches_of_parts_add_up(size: int, parts: int) -> None:
    values = drawn(size)
    cuts = [size * at // parts for at in range(parts + 1)]
    runs = [Run(begin, end - begin, size) for begin, end in pairwise(cuts) if end > begin]
    pieces = [values[run.start : run.start + run.size] for run in runs]
    together = Sketcher(runs, values.device)(pieces).sum(0)
    whole = sketch(values)
    assert (together - whole).abs().max() < 1e-9 * float(whole[SQUARE])


@pytest.mark.parametrize("size", SIZES)
def test_a_sketch_holds_the_norm_and_elements(size: int) -> None:
    values = drawn(size)
    found = sketch(values)
    assert float(found[SQUARE]) == pytest.approx(float(values.double().square().sum()), rel=1e-6)
    held = places(size)
    assert len(held) <= 16
    assert found[ELEMENTS][: len(held)].equal(values[held].double())
    assert not found[ELEMENTS][len(held) :].any()


def test_the_norm_of_a_difference_is_told_within_a_factor_of_two() -> None:
    ratios = []
    for seed in range(200):
        one, two = drawn(5000, seed), drawn(5000, seed + 1000)
        estimate = norm_of_sums((sketch(one) - sketch(two))[SUMS])
        ratios.append(float(estimate / (one - two).double().norm()))
    found = torch.tensor(ratios)
    assert found.min() > 0.5
    assert found.max() < 2.0
    assert float(found.square().mean()) == pytest.approx(1.0, abs=0.1)
    # 16 buckets leave a relative standard deviation of 0.7 / 16**0.5.
    assert float(found.std()) == pytest.approx(0.18, abs=0.05)


@pytest.mark.parametrize("size", [1000, 2**16 + 3])
def test_one_last_bit_changes_a_sketch(size: int) -> None:
    values = drawn(size)
    changed = values.clone()
    changed[size // 2] = torch.nextafter(changed[size // 2], torch.tensor(9.0))
    assert norm_of_sums((sketch(changed) - sketch(values))[SUMS]) > 0


def test_a_fingerprint_adds_up_over_parts_of_a_batch() -> None:
    batch = {"x": drawn(60).view(12, 5), "y": torch.arange(12)}
    for cut in (1, 4, 7):
        parts = [
            {name: value[:cut] for name, value in batch.items()},
            {name: value[cut:] for name, value in batch.items()},
        ]
        total = torch.tensor([fingerprint(part) for part in parts]).sum()
        assert int(total) == fingerprint(batch)


def test_a_fingerprint_sees_what_belongs_together() -> None:
    values, targets = drawn(60).view(12, 5), torch.arange(12)
    whole = fingerprint((values, targets))
    assert fingerprint((values.flip(0), targets.flip(0))) == whole
    assert fingerprint((values, targets.flip(0))) != whole
    assert fingerprint((values.flip(1), targets)) != whole
    changed = values.clone()
    changed[3, 2] = torch.nextafter(changed[3, 2], torch.tensor(9.0))
    assert fingerprint((changed, targets)) != whole


def test_a_fingerprint_counts_a_sample_as_often_as_it_comes() -> None:
    one = drawn(5).view(1, 5)
    assert fingerprint(one.expand(2, 5)) != fingerprint(one)
    assert fingerprint(torch.zeros(0, 5)) == 0
