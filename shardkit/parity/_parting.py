"""Where two runs part: the first bit, and the first difference that is more than round-off."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardkit.parity._pair import Pair, relative
from shardkit.parity._results import Parting
from shardkit.parity._roundoff import SHARE, Bound


def partings(pair: Pair, bound: Bound, updates: Tensor | None) -> tuple[Parting | None, Parting | None]:
    """Return where the first bit differs, and the first difference beyond round-off.

    ``updates``, ``(S, P)``, says which weights moved by another rule, however small the gap that it makes.
    """
    first = None
    for parting, beyond in _differing(pair, bound, updates):
        first = first or parting
        if beyond:
            return first, parting
    return first, None


def _differing(pair: Pair, bound: Bound, updates: Tensor | None) -> Iterator[tuple[Parting, bool]]:
    """Yield what differs, in the order in which a run computes it, and whether by more than round-off."""
    start = pair.weight_apart[0]
    if bool((start > 0).any()):
        which = bound.gap.start
        yield _of_parameter(pair, pair.weights, 0, 1, "weights before the first step", which, start > 0, bound.start)
    data = pair.a.data[: pair.steps] != pair.b.data[: pair.steps]
    moved = bound.weight if updates is None else bound.weight | updates
    for step in range(pair.steps):
        # Another fingerprint of what gives the same loss and gradients is another way to record it.
        if bool(data[step]):
            yield Parting(step + 1, "data"), bool(bound.loss[step] | bound.gradient[step].any())
        yield from _number(pair, "loss", step, pair.loss, bound.loss)
        apart = (pair.gradient_apart[step] > 0) | (pair.has_gradient[0][step] != pair.has_gradient[1][step])
        if bool(apart.any()):
            gap = _of_own(pair.gradient_apart[step], pair.gradient_norms[0][step], pair.gradient_norm[0][step])
            yield _of_parameter(pair, pair.gradients, step, step + 1, "gradient", gap, apart, bound.gradient[step])
        yield from _number(pair, "gradient norm", step, pair.gradient_norm, bound.norm)
        yield from _rates(pair, step)
        applied = bool(pair.a.applied[step]), bool(pair.b.applied[step])
        if applied[0] != applied[1]:
            yield Parting(step + 1, "applied", a=float(applied[0]), b=float(applied[1]), relative=1.0), True
        apart = pair.weight_apart[step + 1] > 0
        if bool((apart | moved[step]).any()):
            gap = bound.gap.weight[step]
            yield _of_parameter(pair, pair.weights, step + 1, step + 1, "weight", gap, apart, moved[step])


def _of_parameter(
    pair: Pair,
    values: tuple[Tensor, Tensor],
    at: int,
    step: int,
    quantity: str,
    gap: Tensor,
    apart: Tensor,
    beyond: Tensor,
) -> tuple[Parting, bool]:
    """Return the parting of the parameter with the largest gap: of those beyond the bound, where there are any."""
    these = beyond if bool(beyond.any()) else apart
    place = int(torch.where(these, gap, -1.0).argmax())
    one, other = (value[at, :, place, 0].sqrt() for value in values)
    difference = pair.weight_apart if values is pair.weights else pair.gradient_apart
    scale = float(one.max()) or float(other.max())
    found = Parting(
        step,
        quantity,
        pair.names[place],
        a=float(one.max()),
        b=float(other.max()),
        relative=float(difference[at, place]) / scale if scale else 0.0,
        rank=pair.furthest_rank(values, at, place),
        count=int(these.sum()),
    )
    return found, bool(beyond.any())


def _of_own(apart: Tensor, norms: Tensor, whole: Tensor) -> Tensor:
    return torch.where(apart == 0, 0.0, apart / torch.maximum(norms, SHARE * whole)).nan_to_num(math.inf, math.inf)


def _number(
    pair: Pair, quantity: str, step: int, values: tuple[Tensor, Tensor], beyond: Tensor
) -> Iterator[tuple[Parting, bool]]:
    one, other = float(values[0][step]), float(values[1][step])
    if one == other or not (math.isfinite(one) or math.isfinite(other)):
        return
    gap = float(relative(values[0][step], values[1][step]))
    # Of sketches that were added up in another order, which is no difference of the gradients.
    if quantity == "gradient norm" and gap < 1e-13:
        return
    yield Parting(step + 1, quantity, a=one, b=other, relative=gap, ulps=ulps(one, other)), bool(beyond[step])


def _rates(pair: Pair, step: int) -> Iterator[tuple[Parting, bool]]:
    one, other = pair.a.rates[step], pair.b.rates[step]
    if len(one) != len(other):
        # The groups were cut otherwise: there is nothing to compare but whether the same rates occur.
        one, other = one.unique(), other.unique()
        if len(one) != len(other):
            return
    gap = relative(one, other)
    if bool((gap > 0).any()):
        at = int(gap.argmax())
        rates = float(one[at]), float(other[at])
        beyond = float(gap[at]) > 1e-6
        yield Parting(step + 1, "learning rate", f"group {at + 1}", *rates, float(gap[at]), ulps(*rates)), beyond


def ulps(one: float, other: float) -> float | None:
    """Return how many float32 numbers lie from one value to the other; None where one isn't finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return None
    largest = max(abs(one), abs(other), torch.finfo(torch.float32).tiny)
    return abs(one - other) / 2.0 ** (math.floor(math.log2(largest)) - 23)
