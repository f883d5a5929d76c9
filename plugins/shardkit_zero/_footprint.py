"""What the fullest rank holds under ZeroRedundancyOptimizer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shardkit import ModelSize, Stepped
from shardkit.replicated import ReplicatedFootprint

if TYPE_CHECKING:
    from shardkit import ParameterSize

SMALL = 2**18
"""Bytes of a parameter from which on it travels to the other ranks by itself."""

PARCEL = 2**20
"""Bytes of small parameters that travel together."""

IN_FLIGHT = 4 * 2**20
"""Bytes of copies on their way from which on the engine waits for some to arrive."""


@final
class ZeroFootprint(ReplicatedFootprint):
    """Whole weights and gradients; the state of the parameters that the rank owns."""

    def __init__(self, model: ModelSize, *, bucket_cap_mb: float | None, overlap: bool) -> None:
        super().__init__(model, bucket_cap_mb=bucket_cap_mb, overlap=overlap)
        own = max(owned(model.parameters, model.world_size), key=_stepped_bytes)
        self._stepped = [Stepped(value.shape, value.name) for value in own if value.trainable]
        small = sum(value.nbytes for value in model.parameters if value.updated and value.nbytes < SMALL)
        self._sent = min(IN_FLIGHT, small) if model.world_size > 1 else 0

    def stepped(self) -> Sequence[Stepped]:
        return self._stepped

    def step(self) -> int:
        return max(super().step(), self._sent)


def owned(parameters: Sequence[ParameterSize], world_size: int) -> list[list[ParameterSize]]:
    """Return the parameters that each rank owns: as torch does it, the largest first, each to the emptiest rank."""
    parts: list[list[ParameterSize]] = [[] for _ in range(world_size)]
    ranks = [(0, rank) for rank in range(world_size)]
    for value in sorted(parameters, key=lambda value: value.elements, reverse=True):
        if value.updated:
            size, rank = ranks[0]
            parts[rank].append(value)
            heapq.heapreplace(ranks, (size + value.elements, rank))
    return parts


def _stepped_bytes(part: Sequence[ParameterSize]) -> int:
    return sum(value.nbytes for value in part if value.trainable)
