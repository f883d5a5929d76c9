"""The gaps of a comparison, for those who plot them."""

from __future__ import annotations

import torch
from torch import Tensor

from shardkit.parity._pair import Pair, relative
from shardkit.parity._results import Gaps
from shardkit.parity._trace import Trace


def gaps(pair: Pair) -> Gaps:
    """Return how far apart two runs are at each step, relative to the first."""
    weights = pair.weight_apart[1:]
    gradient_norms, weight_norms = (_scales(*norms) for norms in (pair.gradient_norms, pair.weight_norms))
    return Gaps(
        loss=pair.loss_gap.tolist(),
        gradient_norm=relative(*pair.gradient_norm).tolist(),
        gradients=_over(_total(pair.gradient_apart), _total(gradient_norms)).tolist(),
        weights=_over(_total(weights), _total(weight_norms[1:])).tolist(),
        names=list(pair.names),
        parameter_gradients=_over(pair.gradient_apart, gradient_norms).T.tolist(),
        parameter_weights=_over(weights, weight_norms[1:]).T.tolist(),
    )


def final(a: Trace, b: Trace) -> tuple[float | None, float | None]:
    """Return how far the weights at the end are apart: in L2 norms, and in units in the last place.

    That is the place of float32, or of a coarser type of a's, at the largest element of each tensor. None where a trace
    lacks them, and of runs of other lengths.
    """
    if a.steps != b.steps:
        return None, None
    names = [name for name in a.final_weights if name in b.final_weights]
    pairs = [(a.final_weights[name], b.final_weights[name]) for name in names]
    pairs = [(one, other) for one, other in pairs if one.shape == other.shape and one.is_floating_point()]
    if not pairs:
        return None, None
    apart = scale = ulps = 0.0
    for one, other in pairs:
        difference = other.double() - one.double()
        apart += float(difference.square().sum())
        scale += float(one.double().square().sum())
        if one.numel():
            most = one.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            digits = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
            ulps = max(ulps, float(difference.abs().max() / (digits * torch.exp2(torch.log2(most).floor()))))
    return (apart / scale) ** 0.5 if scale else float(apart > 0), ulps


def same_bits(a: Trace, b: Trace) -> bool:
    """Return whether the weights and buffers at the end, where both have them, are the same to the last bit."""
    return a.steps != b.steps or all(
        value.dtype == other.dtype
        and value.shape == other.shape
        and torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for name, value in a.final_weights.items()
        if (other := b.final_weights.get(name)) is not None
    )


def _total(values: Tensor) -> Tensor:
    return values.square().sum(1).sqrt()


def _scales(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one == 0, other, one)


def _over(apart: Tensor, scale: Tensor) -> Tensor:
    return torch.where(apart == 0, 0.0, (apart / scale).nan_to_num(torch.inf, torch.inf))
