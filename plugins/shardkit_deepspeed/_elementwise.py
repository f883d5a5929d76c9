"""Whether an optimizer may be cut: each element's update depends on that element alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shardkit.errors import UnsupportedError
from shardkit_deepspeed._fragments import clone, settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_SHAPES = ((3, 4), (5,))
_STEPS = 3


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Raise unless the optimizer gives the same on pieces of a tensor as on the whole.

    Tried on a few numbers with each group's settings, in a few microseconds and without a trace.

    Raises:
        UnsupportedError: it doesn't, or can't be tried.
    """
    name = type(optimizer).__name__
    elsewhere = "use deepspeed:stage=0 or ddp, where it gets whole tensors"
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        wanted = settings(group)
        if any(_same(wanted, other) for other in tried):
            continue
        tried.append(wanted)
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        try:
            whole = _trial(optimizer, wanted, device, cut=False)
            pieces = _trial(optimizer, wanted, device, cut=True)
        except Exception as error:
            raise UnsupportedError(
                f"backend 'deepspeed' at stage {stage} steps with pieces of parameters, and {name} can't do that "
                f"({type(error).__name__}: {error}); {elsewhere}"
            ) from error
        if whole[1] or pieces[1]:
            raise UnsupportedError(
                f"backend 'deepspeed' at stage {stage} steps with pieces of parameters, and {name} changes its own "
                f"{(whole[1] or pieces[1])[0]!r} at each step, as if each piece were the model; {elsewhere}"
            )
        if not torch.allclose(whole[0], pieces[0], rtol=1e-5, atol=1e-7, equal_nan=True):
            raise UnsupportedError(
                f"backend 'deepspeed' at stage {stage} steps with pieces of parameters, and {name} gives something "
                f"else on a piece than on the whole tensor (it isn't element-wise, or it draws random "
                f"numbers); {elsewhere}"
            )


def _trial(
    optimizer: Optimizer, wanted: dict[str, Any], device: torch.device, *, cut: bool
) -> tuple[Tensor, list[str]]:
    """Return the elements after a few steps, and what the optimizer changed of itself other than state."""
    numbers = torch.Generator().manual_seed(0)
    sizes = [math.prod(shape) for shape in _SHAPES]
    flat = torch.rand(sum(sizes), generator=numbers).add_(0.5).to(device)
    parts = [part.clone() for part in flat.split(sizes)]
    if cut:
        # Uneven pieces, as partitions cut them.
        params = [piece.clone() for part in parts for piece in part.split([1, 2, part.numel() - 3])]
    else:
        params = [part.view(shape) for part, shape in zip(parts, _SHAPES, strict=True)]
    params = [value.requires_grad_() for value in params]
    twin = clone(optimizer, [{**wanted, "params": params}])
    initial = _initial_state(optimizer)
    for value in params:
        if initial:
            twin.state[value] = {
                key: entry.flatten()[:1].expand(value.shape).clone().to(device) if per_element else _copied(entry)
                for key, (entry, per_element) in initial.items()
            }
    before = _own(twin)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for _ in range(_STEPS):
            gradient = torch.randn(sum(sizes), generator=numbers).to(device)
            at = 0
            for value in params:
                value.grad = gradient[at : at + value.numel()].view(value.shape).clone()
                at += value.numel()
            twin.step()
    after = _own(twin)
    changed = [key for key in after if key not in before or not _equal(before[key], after[key])]
    return torch.cat([value.detach().flatten() for value in params]), changed


def _initial_state(optimizer: Optimizer) -> dict[str, tuple[Any, bool]]:
    """Return an entry of the state that the optimizer already holds, and whether it is one per element."""
    for parameter, entry in optimizer.state.items():
        if parameter.numel() > 1:
            return {
                key: (value, isinstance(value, torch.Tensor) and value.shape == parameter.shape)
                for key, value in entry.items()
            }
    return {}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings and plain attributes of an optimizer, to tell whether it changed them."""
    plain = {key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float | str | None)}
    return {**plain, **settings(optimizer.param_groups[0])}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other or (
            isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
        )
    return bool(one == other)
