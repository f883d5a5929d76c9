"""Checkpoints: training state by parameter name, which any strategy goes on from at any number of ranks.

``docs/checkpoints.md`` describes the format.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.checkpoints._directory import checkpoints as checkpoints
    from shardkit.checkpoints._directory import latest as latest
    from shardkit.checkpoints._export import export as export
    from shardkit.checkpoints._import import import_checkpoint as import_checkpoint
    from shardkit.checkpoints._inspect import Inspection as Inspection
    from shardkit.checkpoints._inspect import SavedTensor as SavedTensor
    from shardkit.checkpoints._inspect import inspect as inspect

# Each public name and the module that holds it: a look at which checkpoints there are needs no torch.
_HOMES = {
    "Inspection": "_inspect",
    "SavedTensor": "_inspect",
    "checkpoints": "_directory",
    "export": "_export",
    "import_checkpoint": "_import",
    "inspect": "_inspect",
    "latest": "_directory",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkit.checkpoints' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shardkit.checkpoints.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
