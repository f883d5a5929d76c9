"""How far two float32 runs of the same arithmetic may be apart, in one place, and why.

The same sums in another order differ by round-off: another cut of the batch into ranks and micro-batches, other kernels,
other reductions. A step takes it in through the weights and gives it on, so it grows, as training is chaotic: after many
steps any gap may be round-off. What it never does is jump. So a gap counts once it is above a floor (``LOSS`` ...), and
more than ``JUMP`` times as large as any before it, of that quantity or of the weights that it is computed from.

The floors are several times the largest gap that plain runs show (torch 2.13.0+cpu, x86_64; mlp, gpt2-tiny and t5-tiny,
mlp and gpt2-tiny also with AdamW; six cuts of 16 samples over 1, 2 and 4 ranks and 1 to 8 micro-batches, under every
strategy; 30 steps; all pairs):

    quantity, relative to                                       step 1    any step    growth in a step
    loss                                                       1.1e-07     2.5e-07      2.5
    gradient norm                                              1.4e-08     1.4e-06      5.8
    gradient of a parameter, its own norm or 1e-3 of all       7.4e-07     4.9e-06      2.2
    weight of a parameter, what it moved or 1e-3 of all         TODO

Under one cut all strategies give the same bits there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardkit.parity._pair import Pair, relative

LOSS = 2e-6
NORM = 1e-5
GRADIENT = 2e-5
WEIGHT = 1e-3
JUMP = 30.0

SHARE = 1e-3
"""The gap of a parameter's gradient is relative to its norm, or to this share of the norm of all where that is more: a
gradient that is 0 but for round-off, as that of an attention's key bias, has the round-off of what cancelled in it."""

NOISE = 1e-6
"""A gradient that differs by less than this, of the norm of all, and yet by a thousandth of its own, is noise. Adam makes
whole steps of it: the weights then differ by all that they moved, which changes nothing else."""

_WEIGHT_BITS = 2.0**-22
"""What of a weight is rounding: a few last bits, however little it moves."""

_TIMES_ITSELF = 3.0
"""How many times as far as another run of its own a run may be from a, before it counts as different."""


class Bound:
    """Which gaps of a pair are more than round-off, or more than what run a differs from itself by."""

    def __init__(self, pair: Pair, itself: Pair | None = None) -> None:
        own = None if itself is None else Gap(itself)
        gap = Gap(pair)
        self.gap = gap
        inputs = torch.cat([torch.zeros_like(gap.weights[:1]), gap.weights[:-1]])
        self.loss = _beyond(gap.loss, LOSS, own and own.loss, inputs)
        self.norm = _beyond(gap.norm, NORM, own and own.norm, inputs)
        self.gradient = _beyond(gap.gradient, GRADIENT, own and own.gradient, torch.maximum(inputs, _before(gap.gradients)))
        self.weight = _beyond(gap.weight, WEIGHT, own and own.weight, inputs) & ~gap.noise
        self.start = gap.start > 2.0**-22
        if own is not None:
            self.start &= gap.start > _TIMES_ITSELF * own.start


class Gap:
    """The gaps that are held to the bound, by step and parameter."""

    def __init__(self, pair: Pair) -> None:
        norms, apart = pair.gradient_norms[0], pair.gradient_apart
        whole = pair.gradient_norm[0].unsqueeze(1)
        self.loss = pair.loss_gap
        self.norm = relative(*pair.gradient_norm)
        self.gradient = _over(apart, torch.maximum(norms, SHARE * whole))
        self.gradients = _over(apart.square().sum(1).sqrt(), whole.squeeze(1))
        # A parameter that has moved by noise once stays where it is.
        self.noise = ((apart > 1e-3 * norms) & (apart < NOISE * whole)).cummax(0).values
        moved = torch.maximum(*pair.moved)
        everything = moved.square().sum(1, keepdim=True).sqrt()
        rounding = _WEIGHT_BITS * pair.weight_norms[0][1:]
        excess = (pair.weight_apart[1:] - rounding).clamp_min(0.0)
        self.weight = _over(excess, torch.maximum(moved, SHARE * everything))
        self.weights = _over(excess.square().sum(1).sqrt(), everything.squeeze(1))
        self.start = _over(pair.weight_apart[0], torch.maximum(*(norms[0] for norms in pair.weight_norms)))


def _over(apart: Tensor, scale: Tensor) -> Tensor:
    return torch.where(apart == 0, 0.0, (apart / scale).nan_to_num(torch.inf, torch.inf))


def _before(gap: Tensor) -> Tensor:
    """Return the largest gap of the steps before each."""
    return torch.cat([torch.zeros_like(gap[:1]), gap.cummax(0).values[:-1]])


def _beyond(gap: Tensor, floor: float, itself: Tensor | None, inputs: Tensor) -> Tensor:
    """Return where a gap is above the floor, above JUMP times any before it or in the inputs, and above the run's own."""
    inputs = inputs.cummax(0).values
    before = torch.maximum(_before(gap), inputs if gap.dim() == 1 else inputs.unsqueeze(1))
    found = (gap > floor) & (gap > JUMP * before)
    if itself is not None:
        steps = min(len(gap), len(itself))
        reached = itself.cummax(0).values
        reached = torch.cat([reached[:steps], reached[steps - 1 : steps].expand(len(gap) - steps, *reached.shape[1:])])
        found &= gap > _TIMES_ITSELF * reached
    return found
