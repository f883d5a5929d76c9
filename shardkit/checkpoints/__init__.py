"""Checkpoints: training state by parameter name, which any strategy goes on from at any number of ranks.

``docs/checkpoints.md`` describes the format.
"""

from __future__ import annotations

from shardkit.checkpoints._directory import checkpoints, latest

__all__ = ["checkpoints", "latest"]
