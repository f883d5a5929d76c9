"""torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state in shards, gathered block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit import Backend, Engine, Footprint, ModelSize, Strategy, Variant, hookimpl
from shardkit_fsdp._options import FSDPOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_ALL = frozenset({"optimizer", "gradients", "parameters"})


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="fsdp",
        summary="torch's fully_shard (FSDP2)",
        variants=(
            Variant(strategy="fsdp", summary="shards parameters, gradients and optimizer", shards=_ALL, speed=0.74),
            Variant(
                strategy="fsdp:offload=cpu",
                summary="the same with all shards and the optimizer's step in host memory",
                shards=_ALL,
                offloads=_ALL,
            ),
        ),
        devices=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=FSDPOptions,
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: FSDPOptions
) -> Engine | None:
    from shardkit_fsdp._build import build, check_gather

    check_gather(strategy, options)
    return None if optimizer is None else build(model, optimizer, strategy, options)


@hookimpl
def shardkit_control(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FSDPOptions) -> Engine:
    from shardkit_fsdp._control import build

    return build(model, optimizer, strategy, options)


@hookimpl
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: FSDPOptions) -> Footprint:
    from shardkit_fsdp._build import check_gather
    from shardkit_fsdp._footprint import FSDPFootprint

    check_gather(strategy, options)
    return FSDPFootprint(model, options)
