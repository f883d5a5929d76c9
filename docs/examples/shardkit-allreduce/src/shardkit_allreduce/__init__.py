"""The backend ``allreduce`` of shardkit: its declaration and its hooks. Imports neither torch nor a library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit import Backend, Engine, Footprint, ModelSize, Strategy, Variant, hookimpl, option
from shardkit.errors import StrategyError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Options:
    """What can be set of the backend; ``shardkit backends allreduce`` lists it."""

    bucket_mb: float = option(25.0, "how much of the gradients is averaged in one collective", unit="MiB")

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise StrategyError(f"option 'bucket_mb' of backend 'allreduce' is above 0 MiB, not {self.bucket_mb}")


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="allreduce",
        summary="averages the gradients after the window",
        variants=(Variant(strategy="allreduce", summary="shards nothing; gradients are averaged after the window"),),
        # The suite runs on the CPU: say "cuda" too once you have tried it there.
        devices=frozenset({"cpu"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=Options,
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: Options
) -> Engine | None:
    # What is heavy is imported here, and not before.
    from shardkit_allreduce._engine import AllreduceEngine

    return None if optimizer is None else AllreduceEngine(model, optimizer, strategy, options)


@hookimpl
def shardkit_footprint(model: ModelSize, options: Options) -> Footprint:
    from shardkit_allreduce._footprint import AllreduceFootprint

    return AllreduceFootprint(model, options)
