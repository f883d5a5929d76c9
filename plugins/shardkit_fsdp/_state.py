"""The state that an optimizer brings, cut to a rank's shards."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def carried_state(state: dict[str, Any], shape: torch.Size, start: int, count: int, name: str) -> dict[str, Any]:
    """Return a shard's part of the state that an optimizer holds of the whole parameter.

    Raises:
        UnsupportedError: an entry is neither one value nor one for each element.
    """
    part: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            part[key] = copy.deepcopy(value)
        elif value.shape == shape and key != "step":
            part[key] = value.detach().reshape(-1).narrow(0, start, count).clone()
        elif value.numel() == 1:
            part[key] = value.detach().clone()
        else:
            raise UnsupportedError(
                f"backend 'fsdp' can't shard the optimizer's state {key!r} of parameter {name!r}: its shape is "
                f"{tuple(value.shape)}, the parameter's {tuple(shape)}; use ddp"
            )
    return part


def check_state(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless the state that the optimizer holds can be sharded, on every rank and not on those that hold a part.

    Raises:
        UnsupportedError: names the entry.
    """
    for name, value in model.named_parameters():
        if value in optimizer.state:
            carried_state(optimizer.state[value], value.shape, 0, 0, name)
