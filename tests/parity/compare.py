"""How far a trace is from another, in numbers that no constant factor can hide in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from .cells import Trace


@dataclass(frozen=True)
class Distance:
    """How far one value is from what is expected, relative to the expected value.

    For a tensor: the largest difference of an element, relative to the largest element; infinite where a value is not a
    number, or is missing. ``ratio`` is the factor by which the values are too large, if one factor explains them.
    """

    what: str
    relative: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.what} is {self.relative:.2g} away relative to the reference, which it is {self.ratio:.7g} times"


def losses(ranks: list[Trace], expected: Trace) -> Iterator[Distance]:
    """Compare the mean loss over ranks and micro-batches, step by step."""
    yield _lengths("steps with a loss", len(ranks[0].losses), len(expected.losses))
    for step, one in enumerate(expected.losses):
        values = [value for trace in ranks for value in trace.losses[step]]
        yield _number(f"step {step}: the loss", _mean(values), _mean(one))


def evaluations(ranks: list[Trace], expected: Trace) -> Iterator[Distance]:
    """Compare the mean over ranks of the loss in evaluation."""
    yield _number("in evaluation: the loss", _mean([v for t in ranks for v in t.evaluations]), *expected.evaluations)


def grad_norms(ranks: list[Trace], expected: Trace) -> Iterator[Distance]:
    """Compare each rank's gradient norm, step by step."""
    for rank, trace in enumerate(ranks):
        yield _lengths(f"rank {rank}: steps with a norm", len(trace.grad_norms), len(expected.grad_norms))
        for step, (value, one) in enumerate(zip(trace.grad_norms, expected.grad_norms, strict=True)):
            yield _number(f"step {step}, rank {rank}: the gradient norm", value, one)


def gradients(ranks: list[Trace], expected: Trace) -> Iterator[Distance]:
    """Compare each parameter's gradient on each rank, step by step."""
    for rank, trace in enumerate(ranks):
        yield _lengths(f"rank {rank}: steps with gradients", len(trace.gradients), len(expected.gradients))
        for step, (found, wanted) in enumerate(zip(trace.gradients, expected.gradients, strict=True)):
            yield from tensors(f"step {step}, rank {rank}: the gradient of", found, wanted)


def weights(ranks: list[Trace], expected: Trace) -> Iterator[Distance]:
    """Compare each weight and buffer on each rank, at the end."""
    for rank, trace in enumerate(ranks):
        yield from tensors(f"at the end, rank {rank}:", trace.weights, expected.weights)


def tensors(what: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[Distance]:
    """Compare tensors by name; a name that only one side has is infinitely far away."""
    for name in sorted(found.keys() ^ wanted.keys()):
        yield Distance(
            f"{what} {name}, which only {'one side' if name in found else 'the reference'} has,", math.inf, math.nan
        )
    for name in wanted.keys() & found.keys():
        yield _tensor(f"{what} {name}", found[name], wanted[name])


def differing_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal to the last bit, or that only one side has."""
    return sorted(
        name
        for name in found.keys() | wanted.keys()
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    )


def within(tolerance: float, distances: Iterator[Distance]) -> None:
    """Fail the test if a distance is beyond the tolerance, and show the largest."""
    far = [distance for distance in distances if not distance.relative <= tolerance]
    if far:
        shown = sorted(far, key=lambda distance: -distance.relative)[:8]
        pytest.fail("\n".join([f"{len(far)} values are beyond {tolerance:g}:", *map(str, shown)]), pytrace=False)


def worst(distances: Iterator[Distance]) -> Distance:
    return max(distances, key=lambda distance: distance.relative)


def _lengths(what: str, found: int, wanted: int) -> Distance:
    return Distance(
        f"the number of {what}, {found} instead of {wanted},", 0 if found == wanted else math.inf, found / wanted
    )


def _number(what: str, found: float, wanted: float) -> Distance:
    return _tensor(what, torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))


def _tensor(what: str, found: Tensor, wanted: Tensor) -> Distance:
    if found.shape != wanted.shape:
        return Distance(f"{what}, of shape {tuple(found.shape)} instead of {tuple(wanted.shape)},", math.inf, math.nan)
    found, wanted = found.double(), wanted.double()
    size = wanted.abs().max().item()
    difference = (found - wanted).abs().max().item()
    ratio = ((found * wanted).sum() / (wanted * wanted).sum()).item()
    if size == 0 or not math.isfinite(difference):
        return Distance(what, 0 if difference == 0 else math.inf, ratio)
    return Distance(what, difference / size, ratio)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
