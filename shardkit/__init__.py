"""One training loop over every sharding library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit import bench as bench
    from shardkit import checkpoints as checkpoints
    from shardkit import errors as errors
    from shardkit import parity as parity
    from shardkit._backend import Backend as Backend
    from shardkit._backend import NoOptions as NoOptions
    from shardkit._backend import Variant as Variant
    from shardkit._backend import option as option
    from shardkit._engine import Engine as Engine
    from shardkit._engine import Shard as Shard
    from shardkit._engine import Update as Update
    from shardkit._finding import Finding as Finding
    from shardkit._footprint import Footprint as Footprint
    from shardkit._footprint import ModelSize as ModelSize
    from shardkit._footprint import ParameterSize as ParameterSize
    from shardkit._footprint import Stepped as Stepped
    from shardkit._hookimpl import hookimpl as hookimpl
    from shardkit._imported import Imported as Imported
    from shardkit._imported import Pieces as Pieces
    from shardkit._imported import Source as Source
    from shardkit._launch import launch as launch
    from shardkit._prepare import prepare as prepare
    from shardkit._registry import backends as backends
    from shardkit._registry import register as register
    from shardkit._session import Session as Session
    from shardkit._strategy import Strategy as Strategy
    from shardkit.bench import MaxBatch as MaxBatch
    from shardkit.bench import find_max_batch as find_max_batch
    from shardkit.planner._make import plan as plan
    from shardkit.workloads import Workload as Workload

__version__ = "0.1.0"

# Each public name and the module that holds it: nothing is imported before it is asked for.
_HOMES = {
    "Backend": "_backend",
    "Engine": "_engine",
    "Finding": "_finding",
    "Footprint": "_footprint",
    "Imported": "_imported",
    "MaxBatch": "bench",
    "ModelSize": "_footprint",
    "NoOptions": "_backend",
    "ParameterSize": "_footprint",
    "Pieces": "_imported",
    "Session": "_session",
    "Shard": "_engine",
    "Source": "_imported",
    "Stepped": "_footprint",
    "Strategy": "_strategy",
    "Update": "_engine",
    "Variant": "_backend",
    "Workload": "workloads",
    "backends": "_registry",
    "bench": "bench",
    "checkpoints": "checkpoints",
    "errors": "errors",
    "find_max_batch": "bench",
    "hookimpl": "_hookimpl",
    "launch": "_launch",
    "option": "_backend",
    "parity": "parity",
    "plan": "planner._make",
    "prepare": "_prepare",
    "register": "_registry",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}", name=name)
    home = importlib.import_module(f"shardkit.{_HOMES[name]}")
    value = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
