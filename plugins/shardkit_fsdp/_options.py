"""The options of the backend ``fsdp``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit import option


@dataclass(frozen=True)
class FSDPOptions:
    """What is gathered together, for how long, and where the shards live."""

    wrap: str = option(
        "auto",
        "which modules gather their parameters together as they run: auto finds the repeated blocks, none gathers the "
        "whole model; else names or classes of modules, joined by |, with * for any part of a name",
    )
    reshard_after_forward: bool | None = option(
        None,
        "give up gathered parameters between a module's forward and its backward, and gather them again; None does so "
        "but for what no block holds",
    )
    offload: Literal["none", "cpu"] = option(
        "none", "where shards of parameters, gradients and optimizer wait and are updated: cpu is host memory"
    )
    gather: Literal["fp32", "low"] = option(
        "fp32",
        "what parameters of two or more dimensions are gathered in: fp32, or low, the strategy's precision bf16 or "
        "fp16, which is half as much to send and to hold; their shards stay float32",
    )
