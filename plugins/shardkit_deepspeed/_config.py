"""A DeepSpeed JSON file: read, and held against the strategy. Needs neither DeepSpeed nor torch."""

from __future__ import annotations

import dataclasses
import json
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
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "torch_autocast": "mixed precision"}


def read_config(path: str) -> dict[str, Any]:
    """Return what a DeepSpeed JSON file says.

    Raises:
        StrategyError: it is missing, isn't JSON, names a key twice, or holds something else than an object.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_without_doubles)
    except FileNotFoundError:
        raise StrategyError(f"there is no DeepSpeed configuration {path!r}") from None
    except OSError as error:
        raise StrategyError(f"can't read DeepSpeed configuration {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise StrategyError(f"DeepSpeed configuration {path!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise StrategyError(f"DeepSpeed configuration {path!r} holds a {type(config).__name__}, not an object")
    return config


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names the key {double!r} twice")
    return table


def check_config(
    path: str, config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions, world_size: int
) -> None:
    """Raise unless the file can be followed, and agrees with the strategy.

    Raises:
        StrategyError: lists, key by key, all that is unknown, not driven, or contradictory.
    """
    found = [*_unknown(config), *_features(config), *_zero(config), *_numerics(config)]
    found += _contradictions(config, strategy, options, world_size)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise StrategyError(f"DeepSpeed configuration {path!r} can't be followed:{lines}")


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


def _numerics(config: Mapping[str, Any]) -> Iterable[str]:
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
    for name, value in types.items() if isinstance(types, dict) else ():
        if said(value) not in (None, "fp32") and name != "keep_in_fp32_modules":
            yield f"data_types.{name}: {value!r}, but the strategy trains in fp32"


def _contradictions(
    config: Mapping[str, Any], strategy: Strategy, options: DeepSpeedOptions, world_size: int
) -> Iterable[str]:
    for item in dataclasses.fields(options):
        if item.name == "config":
            continue
        given, file = getattr(options, item.name), zero_setting(config, item.name)
        if given is not None and file is not None and given != file:
            name = OFFLOADS.get(item.name) or ZERO_OPTIONS[item.name][0]
            yield f"zero_optimization.{name}: {file!r}, but the strategy says {item.name}={given!r}: take one out"
    for key, meaning in _PRECISIONS.items():
        section = config.get(key)
        on = said(section.get("enabled", key != "torch_autocast") if isinstance(section, dict) else section)
        if on:
            yield (
                f"{key}: on, but the strategy says precision={strategy.precision!r}, and backend 'deepspeed' doesn't "
                f"train in {meaning} yet: take it out"
            )
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
