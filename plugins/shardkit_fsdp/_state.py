"""Whether the state that an optimizer brings can be cut to a rank's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.optimizers import cut

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def check_state(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless the state that the optimizer holds can be sharded, on every rank and not on those that hold a part.

    Raises:
        UnsupportedError: names the entry.
    """
    for name, value in model.named_parameters():
        if value in optimizer.state:
            cut(optimizer.state[value], value.shape, 0, 0, backend="fsdp", name=name, instead="ddp")
