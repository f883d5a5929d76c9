"""The flag ``--deepspeed``: a DeepSpeed JSON file, filled from the arguments and held against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import shardkit


@dataclass(frozen=True)
class DeepSpeedFile:
    source: str
    config: dict[str, Any]

    @classmethod
    def read(cls, asked: Any) -> Self:
        return cls(str(asked), {})

    @property
    def optimizer(self) -> bool:
        return "optimizer" in self.config

    @property
    def scheduler(self) -> bool:
        return "scheduler" in self.config

    def strategy(self, args: Any, common: dict[str, Any]) -> shardkit.Strategy:
        return shardkit.Strategy("deepspeed", options={"config": self.source}, track_grad_norm=True, **common)

    def make_scheduler(self, optimizer: Any, args: Any, num_training_steps: int) -> Any: ...
