"""One model and its optimizer under ZeroRedundancyOptimizer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, final

import torch.distributed as dist

from shardkit import Engine, Shard, Strategy
from shardkit.replicated import ReplicatedEngine
from shardkit_zero._shards import Shards

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_zero import ZeroOptions


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: ZeroOptions) -> Engine:
    """Return the engine: without one to share the work with, the user's optimizer has all of it. Collective."""
    if dist.get_world_size() == 1 or not any(group["params"] for group in optimizer.param_groups):
        return ReplicatedEngine("zero", model, optimizer, strategy, **asdict(options))
    return ZeroEngine(model, optimizer, strategy, options)


@final
class ZeroEngine(ReplicatedEngine):
    """Whole gradients on every rank, of which each steps with those of the parameters that it owns."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: ZeroOptions) -> None:
        super().__init__("zero", model, optimizer, strategy, **asdict(options))
        self._names: dict[Tensor, str] = {value: name for name, value in model.named_parameters()}
        self._shards = Shards(self._names, optimizer)

    def updated(self) -> list[Tensor]:
        return self._shards.owned

    def update(self) -> None:
        self._shards.update()

    @property
    def stepper(self) -> Optimizer:
        return self._shards.optim

    def state_shards(self) -> list[Shard]:
        return [Shard(self._names[value], 0, value) for value in self._shards.owned]

    def close(self) -> None:
        super().close()
        self.stepper.state.clear()
