"""Checkpoints: training state by parameter name, which any strategy goes on from at any number of ranks.

``docs/checkpoints.md`` describes the format, ``docs/import.md`` what comes in from other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit.checkpoints._directory import checkpoints, latest

if TYPE_CHECKING:
    from shardkit.checkpoints._import import import_checkpoint as import_checkpoint

__all__ = ["checkpoints", "import_checkpoint", "latest"]


def __getattr__(name: str) -> Any:
    if name != "import_checkpoint":
        raise AttributeError(f"module 'shardkit.checkpoints' has no attribute {name!r}")
    # It needs torch, and a look at which checkpoints there are doesn't.
    from shardkit.checkpoints._import import import_checkpoint

    return import_checkpoint
