"""The section ``optimizer`` of a DeepSpeed JSON file, as a torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch

from shardkit.errors import StrategyError
from shardkit_deepspeed._config import AUTO

if TYPE_CHECKING:
    from torch.optim import Optimizer

# What DeepSpeed's own classes take where the file is silent, other than torch's. DeepSpeed's FusedAdam doesn't decay.
_CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.0}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def from_section(section: Mapping[str, Any], source: str, params: list[torch.nn.Parameter]) -> Optimizer:
    """Return the torch optimizer that the section means, over these parameters.

    Raises:
        StrategyError: it means one that torch doesn't have, or has unknown settings.
    """
    kind, values = meaning(section, source)
    try:
        return kind(params, **values)
    except (TypeError, ValueError) as error:
        raise StrategyError(f"DeepSpeed configuration {source}: optimizer.params: {error}") from None


def check_section(section: Mapping[str, Any], source: str, optimizer: Optimizer) -> None:
    """Raise unless the section says of the optimizer that was handed over what it is.

    Raises:
        StrategyError: lists, key by key, where they differ.
    """
    kind, values = meaning(section, source)
    found = []
    if type(optimizer) is not kind:
        found.append(f"optimizer.type: {section.get('type')!r} means {kind.__name__}, not {type(optimizer).__name__}")
    else:
        written = section.get("params") or {}
        for name, value in values.items():
            if name not in written or written[name] == AUTO:
                continue
            # A schedule of torch's has changed the rate, and kept the optimizer's.
            kept = "initial_lr" if name == "lr" else name
            held = [group.get(kept, group.get(name)) for group in optimizer.param_groups]
            if any(_plain(other) != _plain(value) for other in held):
                found.append(f"optimizer.params.{name}: {value!r}, but the optimizer has {held[0]!r}")
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise StrategyError(
            f"DeepSpeed configuration {source} contradicts the optimizer that was handed to prepare:{lines}\n"
            "  take the section out, or hand over None to have the optimizer built from it"
        )


def meaning(section: Mapping[str, Any], source: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the torch class that the section means, and its settings.

    Raises:
        StrategyError: it means one that torch doesn't have, or has unknown settings.
    """
    where = f"DeepSpeed configuration {source}"
    unknown = [key for key in section if key not in ("type", "params", "legacy_fusion")]
    if unknown:
        raise StrategyError(f"{where}: optimizer.{unknown[0]}: no such key; it has 'type' and 'params'")
    name = section.get("type")
    if not isinstance(name, str) or name.lower() not in _CLASSES:
        raise StrategyError(
            f"{where}: optimizer.type: {name!r} is not one that shardkit builds (Adam, AdamW, SGD, Adagrad): take the "
            "section out, and hand the optimizer to prepare"
        )
    kind, defaults = _CLASSES[name.lower()]
    given = section.get("params") or {}
    if not isinstance(given, dict):
        raise StrategyError(f"{where}: optimizer.params is a table of settings, not {given!r}")
    values = {key: value for key, value in given.items() if value != AUTO}
    if "max_grad_norm" in values:
        raise StrategyError(f"{where}: optimizer.params.max_grad_norm: clipping is the strategy's max_grad_norm")
    # DeepSpeed takes "Adam" for AdamW unless the file says otherwise.
    decoupled = values.pop("adam_w_mode", True)
    if name.lower() == "adam" and decoupled:
        kind = torch.optim.AdamW
    if values.pop("torch_adam", False):
        defaults = {}
    if values.pop("bias_correction", True) is not True:
        raise StrategyError(
            f"{where}: optimizer.params.bias_correction: torch's {kind.__name__} always corrects the bias"
        )
    known = [key for key in inspect.signature(kind).parameters if key != "params"]
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StrategyError(f"{where}: optimizer.params.{key}: torch's {kind.__name__} has no such setting{hint}")
    return kind, {**defaults, **{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
