"""DeepSpeed's checkpoints at stage 0: one file of state dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardkit.errors import CheckpointError
from shardkit_deepspeed._import_common import apart, like_torch


def unsharded(model: Mapping[str, Any], path: Path) -> dict[str, Any]:
    weights, aliases = apart(model["module"])
    found: dict[str, Any] = {"weights": weights, "aliases": aliases}
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return found
    if "param_groups" in optimizer:
        return {**found, "optimizer": like_torch(optimizer)}
    inner = optimizer.get("optimizer_state_dict")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"the optimizer in {str(path)!r} is of a kind that can't be imported")
    found["scale"] = float(optimizer["cur_scale"]) if optimizer.get("dynamic_loss_scale") else None
    keys = [list(group["params"]) for group in inner["param_groups"]]
    groups: Sequence[Sequence[Tensor]] | None = optimizer.get("fp32_groups")
    if groups is None or [len(group) for group in groups] != [len(group) for group in keys]:
        # Fused: one flat tensor for a group, in which nothing says what lies where.
        raise CheckpointError(
            f"the optimizer in {str(path)!r} keeps its weights in flat tensors without saying where each lies, which "
            "can't be imported: save the run at ZeRO stage 1"
        )
    masters = {
        key: value for own, group in zip(keys, groups, strict=True) for key, value in zip(own, group, strict=True)
    }
    return {**found, "optimizer": like_torch(inner), "masters": masters, "dtype": ", in half precision"}
