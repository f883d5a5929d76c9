"""Two traces side by side: in the steps, parameters and ranks that both have, how far apart each quantity is."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from shardkit.parity._sketch import ABSENT, ELEMENTS, SQUARE, SUMS, norm_of_sums
from shardkit.parity._trace import Trace

_SUMMED = 1e-13
"""Below this, relative to the norm, sketches of the same tensor differ that were added up in another order, in float64:
that of a float32 tensor of n elements one of which differs by its last bit is 3e-8 / n**0.5 away."""


@final
class Pair:
    """Two traces of the same model.

    Arrays are float64 and by step, those of parameters ``(S, P)``; where ranks hold different values, of the rank that
    is furthest apart. ``moved`` is what each run's whole training moved so far.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.steps = min(a.steps, b.steps)
        self.names = a.parameters
        self._exact = a.facts.get("strategy") == b.facts.get("strategy") and a.ranks == b.ranks
        order = [b.parameters.index(name) for name in self.names]
        self._gradients = _aligned(a.gradients[: self.steps], b.gradients[: self.steps][:, :, order])
        weights = _aligned(a.weights[: self.steps + 1], b.weights[: self.steps + 1][:, :, order])
        self.detailed = "losses" not in (a.facts.get("detail"), b.facts.get("detail"))
        """Whether both recorded anything of single parameters; if not, what only one has counts for nothing."""
        if not self.detailed:
            self._gradients = _aligned(*(torch.full_like(value, ABSENT) for value in self._gradients))
        unknown = (weights[0][..., SQUARE] == ABSENT) | (weights[1][..., SQUARE] == ABSENT)
        self._weights = tuple(value.masked_fill(unknown.unsqueeze(-1), 0.0) for value in weights)

    @cached_property
    def loss(self) -> tuple[Tensor, Tensor]:
        """``(S,)`` of each."""
        return self.a.loss[: self.steps], self.b.loss[: self.steps]

    @cached_property
    def loss_gap(self) -> Tensor:
        """``(S,)``, relative."""
        return relative(*self.loss)

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """``(S, R, P, WIDTH)`` of each, of as many ranks; 0 where there is none."""
        one, other = (value.masked_fill((value[..., SQUARE] == ABSENT).unsqueeze(-1), 0.0) for value in self._gradients)
        return one, other

    @cached_property
    def has_gradient(self) -> tuple[Tensor, Tensor]:
        """``(S, P)`` of each, bool."""
        one, other = ((value[..., SQUARE] != ABSENT).any(1) for value in self._gradients)
        return one, other

    @cached_property
    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """``(S, P)`` of each: the largest of the ranks'."""
        one, other = (value[..., SQUARE].sqrt().amax(1) for value in self.gradients)
        return one, other

    @cached_property
    def gradient_norm(self) -> tuple[Tensor, Tensor]:
        """``(S,)`` of each: of all gradients together."""
        one, other = (value.square().sum(1).sqrt() for value in self.gradient_norms)
        return one, other

    @cached_property
    def gradient_apart(self) -> Tensor:
        """``(S, P)``: the norms of the differences of the gradients."""
        return self._apart(*self.gradients)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """``(S + 1, R, P, WIDTH)`` of each, of as many ranks; 0 where one of the two didn't record it."""
        one, other = self._weights
        return one, other

    @cached_property
    def weight_norms(self) -> tuple[Tensor, Tensor]:
        """``(S + 1, P)`` of each."""
        one, other = (value[..., SQUARE].sqrt().amax(1) for value in self.weights)
        return one, other

    @cached_property
    def weight_apart(self) -> Tensor:
        """``(S + 1, P)``: the norms of the differences of the weights."""
        return self._apart(*self.weights)

    @cached_property
    def moved(self) -> tuple[Tensor, Tensor]:
        """``(S, P)`` of each: how far the weights are from where they started, after the step."""
        one, other = (norm_of_sums(value[1:, ..., SUMS] - value[:1, ..., SUMS]).amax(1) for value in self.weights)
        return one, other

    def furthest_rank(self, values: tuple[Tensor, Tensor], step: int, parameter: int) -> int | None:
        """Return the rank on which a parameter is furthest apart; None where all are the same."""
        one, other = values
        apart = norm_of_sums((one - other)[step, :, parameter, SUMS])
        return int(apart.argmax()) if len(apart) > 1 and apart.max() > apart.min() else None

    def _apart(self, one: Tensor, other: Tensor) -> Tensor:
        difference = other - one
        sums = norm_of_sums(difference[..., SUMS])
        # What the sketch makes of the two themselves, whose norms are known, is what it makes of their difference, if
        # that is a multiple of them.
        known = one[..., SQUARE] + other[..., SQUARE]
        told = norm_of_sums(one[..., SUMS]).square() + norm_of_sums(other[..., SUMS]).square()
        sums = torch.where(told > 0, sums * (known / told).sqrt().clamp(0.5, 2.0), sums)
        apart = torch.maximum(sums, difference[..., ELEMENTS].square().sum(-1).sqrt())
        if not self._exact:
            apart = torch.where(apart <= _SUMMED * one[..., SQUARE].sqrt(), 0.0, apart)
        # Infinities and NaN have no distance: a step that both left out for them is the same.
        neither = ~(one[..., SQUARE].isfinite() | other[..., SQUARE].isfinite())
        return torch.where(neither, 0.0, apart.nan_to_num(torch.inf, torch.inf)).amax(1)


def relative(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference over the first, or over the second where the first is 0; 0 where neither is finite."""
    scale = torch.where(one == 0, other, one).abs()
    apart = (other - one).abs()
    same = (one == other) | ~(one.isfinite() | other.isfinite())
    return torch.where(same, 0.0, (apart / scale).nan_to_num(torch.inf, torch.inf))


def _aligned(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with as many ranks: one for all is for each; of different numbers, the first of each."""
    ranks = {one.shape[1], other.shape[1]}
    if len(ranks) == 2 and 1 not in ranks:
        return one[:, :1], other[:, :1]
    size = (-1, max(ranks), -1, -1)
    return one.expand(size), other.expand(size)
