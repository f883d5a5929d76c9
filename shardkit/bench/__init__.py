"""Measure what training takes: the memory of a batch, and the largest batch that a budget holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.bench._largest import MaxBatch as MaxBatch
    from shardkit.bench._largest import find_max_batch as find_max_batch
    from shardkit.bench._largest import measure as measure
    from shardkit.bench._results import Bench as Bench
    from shardkit.bench._results import Row as Row
    from shardkit.bench._results import Spread as Spread
    from shardkit.bench._table import Watcher as Watcher
    from shardkit.bench._table import bench as bench
    from shardkit.bench._trials import Listener as Listener
    from shardkit.bench._trials import Trial as Trial
    from shardkit.bench._trials import Trials as Trials

_HOMES = {
    "Bench": "_results",
    "Row": "_results",
    "Spread": "_results",
    "Watcher": "_table",
    "bench": "_table",
    "Listener": "_trials",
    "MaxBatch": "_largest",
    "Trial": "_trials",
    "Trials": "_trials",
    "find_max_batch": "_largest",
    "measure": "_largest",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkit.bench' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardkit.bench.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
