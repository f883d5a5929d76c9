"""torch's ZeroRedundancyOptimizer: gradients are averaged as in DistributedDataParallel, optimizer state is split."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardkit import Backend, Engine, Footprint, ModelSize, Strategy, Variant, hookimpl, option
from shardkit.errors import StrategyError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class ZeroOptions:
    """Options of the backend ``zero``. None of them changes numerics beyond the order of a sum."""

    bucket_cap_mb: float | None = option(
        None, "size of the buckets in which gradients are averaged; None: torch's own choice", unit="MiB"
    )
    overlap: bool = option(
        True, "average gradients during the backward pass; false: after it, which reentrant checkpointing needs"
    )

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise StrategyError(f"option 'bucket_cap_mb' of backend 'zero' is above 0 MiB, not {self.bucket_cap_mb}")


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="zero",
        summary="torch's ZeroRedundancyOptimizer: each rank updates its part of the parameters",
        variants=(
            Variant(
                strategy="zero",
                summary="optimizer state split over the ranks; gradients are averaged during backward",
                shards=frozenset({"optimizer"}),
                speed=1.0,
            ),
        ),
        devices=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=ZeroOptions,
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: ZeroOptions
) -> Engine | None:
    if optimizer is None:
        return None
    from shardkit_zero._engine import build

    return build(model, optimizer, strategy, options)


@hookimpl
def shardkit_control(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: ZeroOptions) -> Engine:
    from shardkit_zero._control import ZeroControl

    return ZeroControl(model, optimizer, strategy)


@hookimpl
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: ZeroOptions) -> Footprint:
    from shardkit_zero._footprint import ZeroFootprint

    return ZeroFootprint(model, **asdict(options))
