<<<<<<< HEAD
"""Parity: record what a run was like, compare it with another, and say where they part and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.parity._compare import compare as compare
    from shardkit.parity._record import Recording as Recording
    from shardkit.parity._record import record as record
    from shardkit.parity._trace import Trace as Trace

_HOMES = {"Recording": "_record", "Trace": "_trace", "compare": "_compare", "record": "_record"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkit.parity' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardkit.parity.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
=======
"""Say where two runs part, why, and since which version."""
>>>>>>> env
