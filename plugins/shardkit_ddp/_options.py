"""What can be set of DistributedDataParallel, and what was measured best."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit import option
from shardkit.errors import StrategyError


@dataclass(frozen=True)
class DDPOptions:
    """Options of the backend ``ddp``. None of them changes numerics beyond the order of a sum."""

    bucket_cap_mb: float | None = option(None, "size of a gradient bucket; None: torch's own choice", unit="MiB")
    gradient_as_bucket_view: bool = option(
        True, "let gradients be views of the buckets instead of copies: saves one copy of the gradients"
    )
    overlap: bool = option(
        True, "average gradients during the backward pass; false: after it, which reentrant checkpointing needs"
    )

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise StrategyError(f"option 'bucket_cap_mb' of backend 'ddp' is above 0 MiB, not {self.bucket_cap_mb}")
