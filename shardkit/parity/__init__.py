"""Parity: record what a run was like, compare it with another, and say where they part and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.parity._bisect import Bisection as Bisection
    from shardkit.parity._bisect import bisect as bisect
    from shardkit.parity._compare import compare as compare
    from shardkit.parity._record import Recording as Recording
    from shardkit.parity._record import record as record
    from shardkit.parity._results import Comparison as Comparison
    from shardkit.parity._results import Report as Report
    from shardkit.parity._suite import run as run
    from shardkit.parity._trace import Trace as Trace
    from shardkit.parity._upgrade import upgrade as upgrade
    from shardkit.parity._work import Work as Work

_HOMES = {
    "Bisection": "_bisect",
    "Comparison": "_results",
    "Recording": "_record",
    "Report": "_results",
    "Trace": "_trace",
    "Work": "_work",
    "bisect": "_bisect",
    "compare": "_compare",
    "record": "_record",
    "run": "_suite",
    "upgrade": "_upgrade",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardkit.parity' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardkit.parity.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
