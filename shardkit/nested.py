"""What engines share about tensors within containers: a module's inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with what ``function`` gives for each of its tensors, other parts as they are.

    Found within tuples, lists, mappings and dataclasses. What holds none that changes is returned itself, not a copy.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed: dict[str, Any]
    if isinstance(value, Mapping):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, function)) is not old}
        if not changed:
            return value
        copied: Any = copy.copy(value)
        for key, new in changed.items():
            copied[key] = new
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := map_tensors(old, function)) is not old}
        if not changed:
            return value
        copied = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(copied, name, new)
        return copied
    return value
