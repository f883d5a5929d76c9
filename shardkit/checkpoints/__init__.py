"""Checkpoints: training state by parameter name, which any strategy goes on from at any number of ranks.

``docs/checkpoints.md`` describes the format.
"""

from __future__ import annotations

from shardkit.checkpoints._directory import checkpoints, latest
from shardkit.checkpoints._export import export
from shardkit.checkpoints._inspect import Inspection, SavedTensor, inspect

__all__ = ["Inspection", "SavedTensor", "checkpoints", "export", "inspect", "latest"]
