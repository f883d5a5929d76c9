"""A DeepSpeed JSON file: read, and held against the strategy. Needs neither DeepSpeed nor torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.errors import StrategyError
from shardkit_deepspeed._keys import (
    FEATURES,
    OFFLOAD_FIXED,
    OFFLOAD_PASSED,
    OFFLOADS,
    REMOVED,
    TOP_LEVEL,
    ZERO,
    ZERO_FIXED,
    ZERO_OPTIONS,
    ZERO_REMOVED,
)

if TYPE_CHECKING:
    from shardkit import Strategy
    from shardkit_deepspeed._options import DeepSpeedOptions

AUTO = "auto"
_HALF = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}


def is_text(given: str) -> bool:
    """Return whether the option ``config`` is JSON itself, and not the path of a file."""
    return given.lstrip().startswith("{")


def name_of(given: str) -> str:
    """Return how errors name a configuration: by its path, since a text may be long."""
    return "given as text" if is_text(given) else repr(given)


def read_config(given: str) -> dict[str, Any]:
    """Return what a DeepSpeed JSON file says, of which the path is given, or the text.

    Raises:
        StrategyError: it is missing, isn't JSON, names a key twice, or holds something else than an object.
    """
    name = name_of(given)
    try:
        text = given if is_text(given) else Path(given).read_text(encoding="utf-8-sig")
        config = json.loads(text, object_pairs_hook=_without_doubles)
    except FileNotFoundError:
        raise StrategyError(f"there is no DeepSpeed configuration {name}") from None
    except OSError as error:
        raise StrategyError(f"can't read DeepSpeed configuration {name}: {error.strerror}") from None
    except ValueError as error:
        raise StrategyError(f"DeepSpeed configuration {name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise StrategyError(f"DeepSpeed configuration {name} holds a {type(config).__name__}, not an object")
    return config


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names the key {double!r} twice")
    return table


def check_config(
    given: str, config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions, world_size: int
) -> None:
    """Raise unless the file can be followed, and agrees with the strategy.

    Raises:
        StrategyError: lists, key by key, all that is unknown, not driven, or contradictory.
    """
    found = [*_unknown(config), *_features(config), *_zero(config), *_numerics(config, strategy, options)]
    found += [*_precision(given, config, strategy, options), *_scale(config, strategy)]
    found += _contradictions(config, strategy, options, world_size)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise StrategyError(f"DeepSpeed configuration {name_of(given)} can't be followed:{lines}")


def said(value: Any) -> Any:
    """Return a value of the file, None where it leaves the choice to us."""
    return None if value == AUTO else value


def zero_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``zero_optimization``, empty if there is none."""
    section = config.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def zero_setting(config: Mapping[str, Any], option: str) -> Any:
    """Return what the file says of one of our options of ZeRO; None if nothing."""
    section = zero_section(config)
    if option in OFFLOADS:
        offload = section.get(OFFLOADS[option])
        return said(offload.get("device")) if isinstance(offload, dict) else None
    values = (said(section[name]) for name in ZERO_OPTIONS[option] if name in section)
    return next((_number(value) for value in values if value is not None), None)


def merged(config: Mapping[str, Any], options: DeepSpeedOptions, option: str, default: Any) -> Any:
    """Return an option's value: as given, else as the file says, else the default."""
    given = getattr(options, option)
    if given is None:
        given = zero_setting(config, option)
    return default if given is None else given


def half_section(config: Mapping[str, Any]) -> str | None:
    """Return the key by which the file asks for half-precision weights; None if it doesn't."""
    return next((key for key in _HALF if _switch(config, key)), None)


def _switch(config: Mapping[str, Any], key: str) -> bool | None:
    """Return whether a section of the file is on, as to DeepSpeed: None where the file leaves it to us."""
    section = config.get(key)
    if not isinstance(section, dict):
        return None if section is None or section == AUTO else bool(section)
    value = said(section.get("enabled"))
    return None if value is None else bool(value)


def _number(value: Any) -> Any:
    # JSON writes 5e8 for a whole number.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unknown(config: Mapping[str, Any]) -> Iterable[str]:
    for key in config:
        if key in REMOVED:
            yield f"{key}: DeepSpeed has removed it (0.19.8 refuses it): take it out"
        elif key not in TOP_LEVEL:
            yield f"{key}: DeepSpeed knows no such key, and would ignore it{_nearest(key, TOP_LEVEL - REMOVED)}"


def _nearest(key: str, known: Iterable[str]) -> str:
    near = get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _features(config: Mapping[str, Any]) -> Iterable[str]:
    for key, instead in FEATURES.items():
        value = said(config.get(key))
        off = value in (None, False, 1, {}) or (isinstance(value, dict) and value.get("enabled") is False)
        if not off:
            yield f"{key}: shardkit doesn't drive this feature ({instead}): take it out"
    if config.get("scheduler") is not None:
        yield (
            "scheduler: shardkit doesn't build schedules: take it out, and build one of torch.optim.lr_scheduler on "
            "session.optimizer"
        )


def _zero(config: Mapping[str, Any]) -> Iterable[str]:
    section = config.get("zero_optimization", {})
    if not isinstance(section, dict):
        yield f"zero_optimization: a table of settings, not {section!r}; write {{'stage': 2}} for stage 2"
        return
    for key, value in section.items():
        where = f"zero_optimization.{key}"
        if key in ZERO_REMOVED:
            yield f"{where}: DeepSpeed has removed it (0.19.8 refuses it): take it out"
        elif key not in ZERO:
            yield f"{where}: DeepSpeed knows no such key{_nearest(key, ZERO - ZERO_REMOVED)}"
        elif key in ZERO_FIXED and said(value) is not None and value not in ZERO_FIXED[key]:
            newer = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}.get(key)
            advice = f"write {newer!r} instead" if newer else "take it out"
            yield f"{where}: {value!r} is not driven by shardkit: {advice}"
    stage = said(section.get("stage"))
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        yield f"zero_optimization.stage: one of 0, 1, 2, 3, not {stage!r}"
    for key in OFFLOADS.values():
        yield from _offload(key, section.get(key))


def _offload(key: str, offload: Any) -> Iterable[str]:
    where = f"zero_optimization.{key}"
    if offload is None or offload == AUTO:
        return
    if not isinstance(offload, dict):
        yield f"{where}: a table of settings such as {{'device': 'cpu'}}, not {offload!r}"
        return
    device = said(offload.get("device"))
    if device == "nvme":
        yield f"{where}.device: 'nvme' is not driven by shardkit; 'cpu' is"
    elif device not in (None, "none", "cpu"):
        yield f"{where}.device: 'none' or 'cpu', not {device!r}"
    for name, value in offload.items():
        if name not in OFFLOAD_PASSED and name not in OFFLOAD_FIXED:
            yield f"{where}.{name}: DeepSpeed knows no such key{_nearest(name, OFFLOAD_PASSED | OFFLOAD_FIXED.keys())}"
        elif name in OFFLOAD_FIXED and said(value) is not None and value not in OFFLOAD_FIXED[name]:
            yield f"{where}.{name}: {value!r} is not driven by shardkit: take it out"


def _numerics(config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions) -> Iterable[str]:
    """Find settings that change what a step computes, from what plain torch would compute."""
    must = {
        "prescale_gradients": (False,),
        "gradient_predivide_factor": (1, 1.0),
        "gradient_allreduce_op": ("mean",),
        "communication_data_type": ("fp32",),
    }
    for key, allowed in must.items():
        value = said(config.get(key))
        if value is not None and value not in allowed:
            yield f"{key}: {value!r} changes what a step computes from plain torch's; write {allowed[0]!r}"
    types = config.get("data_types") or {}
    half = options.half_weights or (options.half_weights is None and half_section(config) is not None)
    weights = strategy.precision if half else "fp32"
    for name, value in types.items() if isinstance(types, dict) else ():
        right = weights if name == "param_dtype" else "fp32"
        if said(value) not in (None, right) and name != "keep_in_fp32_modules":
            what = {"param_dtype": "weights", "grad_accum_dtype": "gradients"}.get(name, "buffers")
            yield f"data_types.{name}: {value!r}, but under this strategy {what} are {right}: write {right!r}"


def _precision(given: str, config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions) -> Iterable[str]:
    precision, half = strategy.precision, options.half_weights
    source = "{...}" if is_text(given) else given
    ask = 'Strategy("deepspeed", precision={!r}, options={{"config": {!r}}})'
    for key, meant in _HALF.items():
        on = _switch(config, key)
        if on and meant != precision:
            yield (
                f"{key}.enabled: on, but the strategy says precision={precision!r}: write "
                f"{ask.format(meant, source)}, or take the section out"
            )
        elif on and half is False:
            yield f"{key}.enabled: on, which means half_weights, but the strategy says half_weights=False"
        elif on is False and half and meant == precision:
            yield f"{key}.enabled: off, but the strategy says half_weights=True in {precision}"
        yield from _unknown_within(key, config.get(key), _SECTIONS[meant])
    section = config.get("torch_autocast")
    held = section if isinstance(section, dict) else {}
    if _switch(config, "torch_autocast"):
        # DeepSpeed's own default.
        name = said(held.get("dtype")) or "bfloat16"
        meant = _AUTOCAST.get(str(name).removeprefix("torch."), "")
        if not meant:
            yield f"torch_autocast.dtype: 'bfloat16' or 'float16', not {name!r}"
        elif meant != precision:
            yield (
                f"torch_autocast.enabled: on in {name}, but the strategy says precision={precision!r}: write "
                f"{ask.format(meant, source)}, or take the section out"
            )
        if half or (half is None and half_section(config)):
            yield "torch_autocast.enabled: on, which keeps float32 weights, but half_weights is asked for"
        if said(held.get("lower_precision_safe_modules")) is not None:
            yield (
                "torch_autocast.lower_precision_safe_modules: gradients of all modules are averaged in float32: take "
                "it out"
            )
    yield from _unknown_within("torch_autocast", section, {"enabled", "dtype", "lower_precision_safe_modules"})


_SECTIONS = {
    "bf16": {
        "enabled",
        "immediate_grad_update",
        "check_grad_overflow",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    },
    "fp16": {
        "enabled",
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "fp16_master_weights_and_grads",
    },
}


def _unknown_within(key: str, section: Any, known: Iterable[str]) -> Iterable[str]:
    for name in section if isinstance(section, dict) else ():
        if name not in known:
            yield f"{key}.{name}: DeepSpeed knows no such key{_nearest(name, known)}"


def _scale(config: Mapping[str, Any], strategy: Strategy) -> Iterable[str]:
    """Find settings of the masters and the loss scale that aren't the session's."""
    fixed: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
        "bf16": {
            "check_grad_overflow": ((True,), "a step whose gradient isn't finite is left out under every strategy"),
            "bf16_master_weights_and_grads": ((False,), "masters and gradients are float32"),
            "bf16_optimizer_states": ((False,), "the optimizer's state is float32"),
        },
        "fp16": {
            "fp16_master_weights_and_grads": ((False,), "masters and gradients are float32"),
            "loss_scale": (
                (0,),
                "the session's loss scale is a dynamic one, which starts at the strategy's loss_scale",
            ),
            "initial_scale_power": (
                (math.log2(strategy.loss_scale),),
                f"the strategy says loss_scale={strategy.loss_scale:g}",
            ),
            "loss_scale_window": (
                (strategy.loss_scale_window,),
                f"the strategy says loss_scale_window={strategy.loss_scale_window}",
            ),
            "hysteresis": ((1,), "the session halves the loss scale at each overflow"),
            "consecutive_hysteresis": ((False,), "the session halves the loss scale at each overflow"),
            "min_loss_scale": ((1,), "the session's loss scale doesn't fall below 1"),
        },
    }
    for key, meant in _HALF.items():
        section = config.get(key)
        if not isinstance(section, dict) or not _switch(config, key):
            continue
        for name, (allowed, why) in fixed[meant].items():
            value = said(section.get(name))
            if value is not None and value not in allowed:
                right = allowed[0]
                right = f"{right:g}" if isinstance(right, float) else repr(right)
                yield f"{key}.{name}: {value!r}, but {why}: write {right} or 'auto'"


def _contradictions(
    config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions, world_size: int
) -> Iterable[str]:
    for item in dataclasses.fields(options):
        if item.name in ("config", "half_weights"):
            continue
        given, file = getattr(options, item.name), zero_setting(config, item.name)
        if given is not None and file is not None and given != file:
            name = OFFLOADS.get(item.name) or ZERO_OPTIONS[item.name][0]
            yield f"zero_optimization.{name}: {file!r}, but the strategy says {item.name}={given!r}: take one out"
    steps = said(config.get("gradient_accumulation_steps"))
    if steps is not None and steps != strategy.accumulate:
        yield (
            f"gradient_accumulation_steps: {steps!r}, but the strategy says accumulate={strategy.accumulate}: the "
            "session counts the window, so write accumulate in the strategy, and 'auto' in the file"
        )
    clip = said(config.get("gradient_clipping"))
    if clip is not None and (clip or None) != strategy.max_grad_norm:
        yield (
            f"gradient_clipping: {clip!r}, but the strategy says max_grad_norm={strategy.max_grad_norm}: write it in "
            "the strategy, and 'auto' in the file"
        )
    yield from _batches(config, strategy.accumulate, world_size)


def _batches(config: Mapping[str, Any], accumulate: int, world_size: int) -> Iterable[str]:
    whole, micro = said(config.get("train_batch_size")), said(config.get("train_micro_batch_size_per_gpu"))
    for key, value in (("train_batch_size", whole), ("train_micro_batch_size_per_gpu", micro)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{key}: a whole number of samples above 0, not {value!r}"
            return
    share = accumulate * world_size
    if whole is not None and micro is not None and whole != micro * share:
        yield (
            f"train_batch_size: {whole}, but {micro} samples x {accumulate} micro-batches x {world_size} ranks are "
            f"{micro * share}"
        )
    elif whole is not None and whole % share:
        yield f"train_batch_size: {whole} can't be shared out over {accumulate} micro-batches x {world_size} ranks"
