"""Tools to test a backend with: a suite to inherit, and ranks to run on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.testing._ranks import preload as preload
    from shardkit.testing._ranks import run as run
    from shardkit.testing._suite import BackendSuite as BackendSuite

__all__ = ["BackendSuite", "preload", "run"]

# The suite needs pytest, which those who only run ranks needn't have, and ranks torch.
_HOMES = {"BackendSuite": "_suite", "preload": "_ranks", "run": "_ranks"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
