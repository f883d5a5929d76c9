"""Plain DistributedDataParallel: every rank holds the whole model and optimizer, gradients are averaged."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from shardkit import Backend, Engine, Footprint, ModelSize, Strategy, Variant, hookimpl
from shardkit_ddp._options import DDPOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="ddp",
        summary="torch's DistributedDataParallel",
        variants=(
            Variant(strategy="ddp", summary="shards nothing; gradients are averaged during backward", speed=1.0),
        ),
        devices=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=DDPOptions,
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: DDPOptions
) -> Engine | None:
    from shardkit_ddp._engine import DDPEngine

    return None if optimizer is None else DDPEngine(model, optimizer, strategy, options)


@hookimpl
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: DDPOptions) -> Footprint:
    from shardkit.replicated import ReplicatedFootprint

    return ReplicatedFootprint(model, **asdict(options))
