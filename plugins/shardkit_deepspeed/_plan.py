"""Every setting that DeepSpeed gets, written out: nothing depends on its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit.errors import StrategyError
from shardkit_deepspeed._config import check_config, half_section, merged, name_of, read_config, said, zero_section
from shardkit_deepspeed._keys import OFFLOAD_PASSED, OFFLOADS, PASSED, ZERO_PASSED

if TYPE_CHECKING:
    from shardkit import Strategy
    from shardkit_deepspeed._options import DeepSpeedOptions

_DEFAULT_STAGE = 2


@dataclass(frozen=True)
class Plan:
    """What a strategy and a file come to.

    ``config`` is what DeepSpeed gets. ``half`` is the precision of the weights, None where they stay float32.
    ``optimizer`` is the file's section of that name, None without one; ``source`` is how errors name the file.
    """

    stage: int
    bucket_size: int
    half: str | None
    config: dict[str, Any]
    optimizer: dict[str, Any] | None
    source: str


def make_plan(strategy: Strategy, options: DeepSpeedOptions, *, elements: int, world_size: int, device: str) -> Plan:
    """Return the plan for a model of so many trainable elements.

    Raises:
        StrategyError: an option or the file is wrong, or they contradict each other.
    """
    file: dict[str, Any] = {}
    source = "" if options.config is None else name_of(options.config)
    if options.config is not None:
        file = read_config(options.config)
        check_config(options.config, file, strategy, options, world_size)
    # A file that is silent means stage 0, to DeepSpeed and so to us.
    stage = merged(file, options, "stage", _DEFAULT_STAGE if options.config is None else 0)
    half = _half(file, strategy, options, stage, source)
    zero = _zero(file, options, stage, elements, world_size, device)
    micro = said(file.get("train_micro_batch_size_per_gpu"))
    if micro is None:
        whole = said(file.get("train_batch_size"))
        # DeepSpeed wants the number and checks it against nothing.
        micro = 1 if whole is None else whole // (strategy.accumulate * world_size)
    config = {
        **{key: file[key] for key in PASSED if said(file.get(key)) is not None},
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": strategy.accumulate,
        "train_batch_size": micro * strategy.accumulate * world_size,
        "managed_gradient_accumulation": True,
        # Not named, DeepSpeed would clip at 1.0. Stage 0 is clipped by our own step.
        "gradient_clipping": (strategy.max_grad_norm or 0.0) if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # The session's scaler multiplies the losses, and the engine divides the gradients by it again.
        "fp16": {"enabled": half == "fp16", **(_FP16 if half == "fp16" else {})},
        "bf16": {"enabled": half == "bf16", **(_BF16 if half == "bf16" else {})},
        # The session runs the forward in autocast itself.
        "torch_autocast": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32", **({"keep_in_fp32_modules": []} if half else {})},
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
    }
    section = file.get("optimizer")
    if section is not None and not isinstance(section, dict):
        raise StrategyError(f"DeepSpeed configuration {source}: 'optimizer' is a table, not {section!r}")
    if section is not None:
        from shardkit_deepspeed._config_optimizer import meaning

        meaning(section, source)
    return Plan(stage, zero["reduce_bucket_size"], half, config, section, source)


_FP16 = {"loss_scale": 1.0, "auto_cast": False, "fp16_master_weights_and_grads": False}
_BF16 = {
    "check_grad_overflow": True,
    "immediate_grad_update": False,
    "bf16_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
}


def _half(file: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions, stage: int, name: str) -> str | None:
    given = options.half_weights
    if not (half_section(file) if given is None else given):
        return None
    source = "option half_weights" if given else f"DeepSpeed configuration {name} with half weights"
    if strategy.precision == "fp32":
        raise StrategyError(
            f"{source} of backend 'deepspeed' keeps the weights in the strategy's precision, which is 'fp32': ask for "
            "precision='bf16' or 'fp16', or leave the option out"
        )
    if stage == 0:
        raise StrategyError(
            f"{source} of backend 'deepspeed' needs stage 1, 2 or 3: at stage 0 DeepSpeed adds up the gradients of "
            "half-precision weights in that precision. Without half_weights, "
            f"deepspeed:stage=0,precision={strategy.precision} keeps the weights in float32, and so does a file with "
            '"torch_autocast": {"enabled": true} in the place of that section'
        )
    return strategy.precision


def _zero(
    file: Mapping[str, Any], options: DeepSpeedOptions, stage: int, elements: int, world_size: int, device: str
) -> dict[str, Any]:
    optimizer = merged(file, options, "offload_optimizer", "none")
    parameters = merged(file, options, "offload_parameters", "none")
    if optimizer != "none" and stage == 0:
        raise StrategyError(
            f"option offload_optimizer={optimizer!r} of backend 'deepspeed' has no effect at stage 0, and DeepSpeed "
            "would not say so: ask for stage 1, 2 or 3"
        )
    if parameters != "none" and stage < 3:
        raise StrategyError(
            f"option offload_parameters={parameters!r} of backend 'deepspeed' has no effect at stage {stage}, and "
            "DeepSpeed would not say so: ask for stage 3"
        )
    bucket = fitting_bucket(elements)
    sizes = {
        "reduce_bucket_size": merged(file, options, "reduce_bucket_size", bucket),
        "allgather_bucket_size": merged(file, options, "allgather_bucket_size", bucket),
        "stage3_prefetch_bucket_size": merged(file, options, "prefetch_bucket_size", 0),
        "stage3_param_persistence_threshold": merged(file, options, "persistence_threshold", 0),
        "stage3_max_live_parameters": merged(file, options, "max_live_parameters", 0),
        "stage3_max_reuse_distance": merged(file, options, "max_reuse_distance", 0),
        "sub_group_size": merged(file, options, "sub_group_size", max(2**16, elements // (16 * world_size))),
    }
    for name, size in sizes.items():
        least = 2 if name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size") else 0
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise StrategyError(f"{name} of backend 'deepspeed' is a whole number from {least} on, not {size!r}")
    if sizes["allgather_bucket_size"] % 2:
        raise StrategyError(
            f"allgather_bucket_size of backend 'deepspeed' is an even number, not {sizes['allgather_bucket_size']}"
        )
    section = zero_section(file)
    return {
        # At stages 1 and 2 it sums a copy on every rank just the same, of which each takes its pieces.
        "reduce_scatter": stage == 3,
        # Each rank then keeps some gradients of every part of the backward, and none has them all at its start.
        "round_robin_gradients": stage == 2,
        **{key: value for key, value in section.items() if key in ZERO_PASSED and said(value) is not None},
        **sizes,
        "stage": stage,
        "overlap_comm": merged(file, options, "overlap_comm", device == "cuda" and stage == 3),
        # To scatter them stage 3 makes another copy anyway.
        "contiguous_gradients": merged(file, options, "contiguous_gradients", stage < 3),
        "offload_optimizer": _offload(section, "offload_optimizer", optimizer, device),
        "offload_param": _offload(section, "offload_parameters", parameters, device),
    }


def _offload(section: Mapping[str, Any], option: str, where: str, device: str) -> dict[str, Any]:
    given = section.get(OFFLOADS[option])
    kept = given if isinstance(given, dict) else {}
    passed = {key: value for key, value in kept.items() if key in OFFLOAD_PASSED and said(value) is not None}
    # Without a GPU there is nothing to copy to that would want locked pages.
    return {"pin_memory": device == "cuda", **passed, "device": where}


def fitting_bucket(elements: int) -> int:
    """Return a bucket size for a model of so many trainable elements, even, in elements.

    About 1/32 of the model, which measured best for 30 million (1e6; DeepSpeed's default is 5e8); no less than 2**18,
    under which messages are too short, and no more than 5e7, 200 MB in fp32.
    """
    size = min(max(elements // 32, 2**18), 50_000_000, max(elements, 2))
    return size + size % 2
