"""What DeepSpeed's checkpoints have in common at all stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit import Imported
from shardkit.errors import CheckpointError

MODEL = "mp_rank_00_model_states.pt"


class _Fields:
    """Stands in for a class of DeepSpeed's that holds plain values."""


class _Number(int):
    """Stands in for a number with a name."""


KNOWN = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": type("LossScaler", (_Fields,), {}),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": type("DynamicLossScaler", (_Fields,), {}),
    "deepspeed.utils.tensor_fragment.fragment_address": type("fragment_address", (_Fields,), {}),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Number,
}
"""What DeepSpeed's files mention, none of which is needed but for its values."""

_OWN = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "data_sampler",
        "random_ltd",
    }
)
"""What DeepSpeed puts beside what the user handed to ``save_checkpoint``, but for the schedule's state."""


def imported(model: Mapping[str, Any], stage: int, *, dtype: str = "", **parts: Any) -> Imported:
    """Return what a checkpoint holds, given what is its stage's own; ``dtype`` says in words how it was trained."""
    skipped = int(model.get("skipped_steps") or 0)
    config = model.get("ds_config")
    rest = {key: value for key, value in model.items() if key not in _OWN and value is not None}
    return Imported(
        kind=f"DeepSpeed checkpoint of ZeRO stage {stage}{dtype}",
        buffers=list(model.get("buffer_names") or ()),
        optimizer_class=_optimizer_class(config if isinstance(config, Mapping) else {}),
        steps=int(model.get("global_steps") or 0) - skipped,
        skipped_steps=skipped,
        world_size=int(model.get("dp_world_size") or 1),
        versions={"deepspeed": str(model["ds_version"])} if model.get("ds_version") else {},
        state=rest,
        **parts,
    )


def _optimizer_class(config: Mapping[str, Any]) -> str | None:
    """Return the class of torch's that does what the optimizer of DeepSpeed's own configuration did, if it says one."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping):
        return None
    kind = str(section.get("type")).lower()
    settings = section.get("params") if isinstance(section.get("params"), Mapping) else {}
    assert isinstance(settings, Mapping)
    if kind in ("adam", "adamw"):
        return "AdamW" if kind == "adamw" or settings.get("adam_w_mode", True) else "Adam"
    return {"adagrad": "Adagrad", "sgd": "SGD"}.get(kind)


def apart(module: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a module's tensors, each once, and the further names of those that share their memory."""
    first: dict[Any, str] = {}
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, value in module.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} of the model is a {type(value).__name__}, not a tensor: it can't be imported"
            )
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            weights[name] = value
    return weights, aliases


def like_torch(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch's classes have it: DeepSpeed's own Adams count steps in other places."""
    groups, counted = [], {}
    for group in optimizer["param_groups"]:
        own = dict(group)
        step = own.pop("step", None)
        if own.get("bias_correction") in (True, 1):
            del own["bias_correction"]
        for key in own["params"]:
            counted[key] = step
        groups.append(own)
    state = {}
    for key, entries in optimizer["state"].items():
        own = dict(entries)
        step = own.get("step", counted.get(key))
        if step is not None and "exp_avg" in own:
            own["step"] = torch.tensor(float(step))
        state[key] = own
    return {"state": state, "param_groups": groups}
