"""The options of the backend ``deepspeed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit import option


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What DeepSpeed can be told. None leaves a setting to the JSON file, if there is one, then to our default."""

    stage: Literal[0, 1, 2, 3] | None = option(
        None, "what is sharded: 1 the optimizer's state, 2 and the gradients, 3 and the parameters; None means 2"
    )
    offload_optimizer: Literal["none", "cpu"] | None = option(
        None, "where optimizer state lives and steps: cpu is host memory; from stage 1 on; None means none"
    )
    offload_parameters: Literal["none", "cpu"] | None = option(
        None, "where parameters wait while unused: cpu is host memory; at stage 3 only; None means none"
    )
    half_weights: bool | None = option(
        None,
        "whether each rank's weights are bf16 or fp16 themselves, as the precision says, beside sharded float32 ones "
        "that the optimizer steps; from stage 1 on; None means false",
    )
    config: str | None = option(
        None, "path of a DeepSpeed JSON configuration, or the JSON itself; 'auto' values in it are filled in"
    )
    reduce_bucket_size: int | None = option(
        None, "how much gradient is averaged at a time; None means a size fit for the model", unit="elements"
    )
    allgather_bucket_size: int | None = option(
        None,
        "how many updated weights are gathered at a time, at stages 1 and 2; None means fit for the model",
        unit="elements",
    )
    overlap_comm: bool | None = option(
        None, "average gradients on a stream of their own during backward, on a GPU; None means false on CPU"
    )
    contiguous_gradients: bool | None = option(
        None, "copy gradients into one buffer before they are averaged; None means true, and false at stage 3"
    )
    prefetch_bucket_size: int | None = option(
        None, "how many parameters to gather ahead of their use, at stage 3; None means 0", unit="elements"
    )
    persistence_threshold: int | None = option(
        None, "parameters up to this size stay whole on every rank, at stage 3; None means 0", unit="elements"
    )
    max_live_parameters: int | None = option(
        None, "how many gathered parameters may be held at a time, at stage 3; None means 0", unit="elements"
    )
    max_reuse_distance: int | None = option(
        None,
        "keep a parameter gathered if it is used again within this many, at stage 3; None means 0",
        unit="elements",
    )
    sub_group_size: int | None = option(
        None,
        "how many parameters the optimizer updates at a time, at stage 3; None means a size fit for the model",
        unit="elements",
    )
