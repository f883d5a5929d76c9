"""The engine over DistributedDataParallel."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, final

from shardkit.replicated import ReplicatedEngine

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardkit import Strategy
    from shardkit_ddp._options import DDPOptions


@final
class DDPEngine(ReplicatedEngine):
    """Every rank steps the user's optimizer over the whole model."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: DDPOptions) -> None:
        super().__init__("ddp", model, optimizer, strategy, **asdict(options))
