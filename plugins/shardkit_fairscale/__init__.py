"""FairScale under shardkit: sharded optimizer state, with sharded or replicated gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardkit import Backend, Engine, Finding, Footprint, ModelSize, Strategy, Variant, hookimpl, option
from shardkit.errors import StrategyError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class FairScaleOptions:
    """What can be set of FairScale."""

    shard: Literal["gradients", "optimizer", "parameters"] = option(
        "gradients",
        "what is split over the ranks: gradients and optimizer state (OSS with ShardedDDP), the optimizer state "
        "alone (OSS with DistributedDataParallel), or the parameters, too (FullyShardedDataParallel, on CUDA only; on "
        "CPU it fails to gather them, and the strategy 'fsdp' does the same)",
    )
    reduce_buffer_size: int = option(
        2**16,
        "with shard=gradients, up to how many elements small gradients travel to their owner together; 0: each alone",
        unit="elements",
    )
    bucket_cap_mb: float = option(
        25.0, "with shard=optimizer, size of the buckets in which gradients are averaged", unit="MiB"
    )

    def __post_init__(self) -> None:
        if self.reduce_buffer_size < 0:
            raise StrategyError(
                "option 'reduce_buffer_size' of backend 'fairscale' is at least 0 elements, not "
                f"{self.reduce_buffer_size}"
            )
        if not self.bucket_cap_mb > 0:
            raise StrategyError(
                f"option 'bucket_cap_mb' of backend 'fairscale' is above 0 MiB, not {self.bucket_cap_mb}"
            )


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="fairscale",
        summary="FairScale: each rank updates its part of the parameters",
        library="fairscale",
        requires="fairscale>=0.4.13",
        install='pip install "shardkit[fairscale]"',
        devices=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=FairScaleOptions,
        variants=(
            Variant(
                strategy="fairscale",
                summary="OSS and ShardedDDP: optimizer state and gradients split over the ranks",
                shards=frozenset({"gradients", "optimizer"}),
                speed=1.0,
            ),
            Variant(
                strategy="fairscale:shard=optimizer",
                summary="OSS and DistributedDataParallel: optimizer state split over the ranks",
                shards=frozenset({"optimizer"}),
                speed=1.05,
            ),
            Variant(
                strategy="fairscale:shard=parameters",
                summary="FullyShardedDataParallel: optimizer state, gradients and parameters split over the ranks",
                shards=frozenset({"parameters", "gradients", "optimizer"}),
                devices=frozenset({"cuda"}),
                elsewhere="FullyShardedDataParallel gathers parameters in CUDA streams; use the strategy 'fsdp', which "
                "splits the same",
            ),
        ),
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: FairScaleOptions
) -> Engine | None:
    if optimizer is None:
        return None
    if options.shard == "parameters":
        from shardkit_fairscale._parameters import build

        return build(model, optimizer, strategy)
    from shardkit_fairscale._engine import FairScaleEngine

    return FairScaleEngine(model, optimizer, strategy, options)


@hookimpl
def shardkit_control(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FairScaleOptions
) -> Engine | None:
    if options.shard == "parameters":
        return None
    from shardkit_fairscale._control import FairScaleControl

    return FairScaleControl(model, optimizer, strategy, options)


@hookimpl
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: FairScaleOptions) -> Footprint:
    from shardkit_fairscale._footprint import FairScaleFootprint, FullyShardedFootprint

    if options.shard == "parameters" and model.world_size > 1:
        return FullyShardedFootprint(model)
    return FairScaleFootprint(model, options)


@hookimpl
def shardkit_diagnose() -> list[Finding]:
    from shardkit_fairscale._diagnose import diagnose

    return diagnose()
