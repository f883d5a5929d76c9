"""How far two float32 runs of the same arithmetic may be apart, in one place, and why.

The same sums in another order differ by round-off: another cut of the batch into ranks and micro-batches, other
kernels, other reductions. A step takes it in through the weights and gives it on, so it grows, as training is chaotic:
after many steps any gap may be round-off. What it never does is jump. So a gap counts once it is above a floor
(``LOSS`` ...), and more than ``JUMP`` times as large as any before it, of that quantity or of the weights that it is
computed from.

The floors are twice to ten times the largest gap of plain runs with learning rates that train well, ``JUMP`` three
times the largest growth (torch 2.13.0+cpu, x86_64, 2026-11; 30 steps of 16 samples, cut over 1, 2 and 4 ranks and 1 to
8 micro-batches, under every strategy; all pairs of 13 runs of each workload):

                      mlp   mlp, AdamW   gpt2-tiny    t5-tiny    gpt2-tiny, AdamW    floor
    loss          3.2e-07      1.7e-07     1.8e-07    2.5e-07             5.1e-06     2e-06
    norm          2.6e-07      4.1e-08     1.8e-06    4.7e-07             3.5e-04     1e-05
    gradient      1.0e-06      3.9e-07     4.9e-06    9.1e-06             5.0e-04     2e-05
    weight        4.4e-07            0     1.9e-06    7.7e-06             5.8e-04     1e-03
    growth            1.6          0.8         2.0        3.1                10.4        30

A gradient is that of a parameter, relative to its norm or 1e-3 of that of all; a weight likewise to what training moved
it. Growth is the largest in a step, of what is above a tenth of the floor. The last workload trains so fast that its
gradient grows eightfold in its last step, and all gaps with it. Under one cut all strategies gave the same bits, but
for t5-tiny's.
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

COARSE = {"bf16": 1000.0, "fp16": 125.0}
"""How much higher the floors are where both runs compute in a low format. In bf16 the same plain runs are up to 3e-3
apart in a gradient of the first step and 1.4e-2 in the second, 1.1e-4 in a loss of the second; fp16 has three binary
digits more."""

_MOST_WEIGHT = 0.1

SHARE = 1e-3
"""The gap of a parameter's gradient is relative to its norm, or to this share of the norm of all where that is more: a
gradient that is 0 but for round-off, as that of an attention's key bias, has the round-off of what cancelled in it."""

NOISE = 1e-6
"""A gradient that differs by less than this, of the norm of all, and yet by a thousandth of its own, is noise. Adam
makes whole steps of it: the weights then differ by all that they moved, which changes nothing else."""

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
        coarse = _coarseness(pair)
        inputs = torch.cat([torch.zeros_like(gap.weights[:1]), gap.weights[:-1]])
        self.loss = _beyond(gap.loss, LOSS * coarse, own.loss if own else None, inputs)
        self.norm = _beyond(gap.norm, NORM * coarse, own.norm if own else None, inputs)
        self.gradient = _beyond(
            gap.gradient,
            GRADIENT * coarse,
            own.gradient if own else None,
            torch.maximum(inputs, _before(gap.gradients)),
        )
        self.weight = (
            _beyond(gap.weight, min(WEIGHT * coarse, _MOST_WEIGHT), own.weight if own else None, inputs) & ~gap.noise
        )
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


def _coarseness(pair: Pair) -> float:
    """Return how much coarser than in float32 both runs compute, if both do."""
    one, other = ((trace.facts.get("settings") or {}).get("precision") for trace in (pair.a, pair.b))
    return COARSE.get(str(one), 1.0) if one == other else 1.0


def _over(apart: Tensor, scale: Tensor) -> Tensor:
    return torch.where(apart == 0, 0.0, (apart / scale).nan_to_num(torch.inf, torch.inf))


def _before(gap: Tensor) -> Tensor:
    """Return the largest gap of the steps before each."""
    return torch.cat([torch.zeros_like(gap[:1]), gap.cummax(0).values[:-1]])


def _beyond(gap: Tensor, floor: float, itself: Tensor | None, inputs: Tensor) -> Tensor:
    """Return where a gap is above the floor, above JUMP times any before and in the inputs, and above its own."""
    inputs = inputs.cummax(0).values
    before = torch.maximum(_before(gap), inputs if gap.dim() == 1 else inputs.unsqueeze(1))
    found = (gap > floor) & (gap > JUMP * before)
    if itself is not None:
        steps = min(len(gap), len(itself))
        reached = itself.cummax(0).values
        reached = torch.cat([reached[:steps], reached[steps - 1 : steps].expand(len(gap) - steps, *reached.shape[1:])])
        found &= gap > _TIMES_ITSELF * reached
    return found
