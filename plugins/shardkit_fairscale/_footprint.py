"""What the fullest rank holds under FairScale, without importing it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shardkit import Footprint, ModelSize, Stepped
from shardkit.averaging import ReducerFootprint

if TYPE_CHECKING:
    from shardkit._footprint import ParameterSize
    from shardkit_fairscale import FairScaleOptions

_SCRATCH = 2 * 2**20
"""What gloo takes for itself in a reduction, at most: two pieces of 1 MiB. Measured with torch 2.13."""


@final
class FairScaleFootprint(Footprint):
    """Whole weights; the state of the parameters that the rank owns, and their gradients at the end of a window."""

    def __init__(self, model: ModelSize, options: FairScaleOptions) -> None:
        super().__init__(model)
        self.held.parameters = sum(value.nbytes for value in model.parameters)
        self._trainable = [value for value in model.parameters if value.trainable]
        trained = sum(value.nbytes for value in self._trainable)
        parts = owned(model.parameters, model.world_size)
        own = max(parts, key=_burden)
        self._stepped = [Stepped(value.shape, value.name) for value in own if value.updated and value.trainable]
        self._own = {value.name for value in own}
        self._kept: dict[str, int] = {}
        # OSS moves the parameters into one buffer for each rank, one after the other.
        self._prepare = max(sum(value.nbytes for value in part if value.trainable) for part in parts)
        self._reducer: ReducerFootprint | None = None
        distributed = model.world_size > 1
        self._scratch = min(_SCRATCH, trained) if distributed and model.device == "cpu" else 0
        self._sharded = distributed and options.shard == "gradients"
        if distributed and not self._sharded:
            self._reducer = ReducerFootprint(self._trainable, bucket_cap_mb=options.bucket_cap_mb)
            self.held.buffers = self._reducer.buffers
            # To find its buckets, zeros are averaged in all of them.
            largest = max((value.nbytes for value in self._trainable), default=0)
            self._prepare = max(self._prepare, self._reducer.most - self._reducer.buffers + largest)

    def stepped(self) -> Sequence[Stepped]:
        return self._stepped

    def prepare(self) -> int:
        return self._prepare

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        if self._reducer is not None:
            passing = self._reducer.ready(name, nbytes, last=last)
            self.held.gradients = self._reducer.gradients
            return max(passing, self._scratch) if last else 0
        self._kept[name] = self._kept.get(name, 0) + nbytes
        self.held.gradients += nbytes
        if not last or not self._sharded or name in self._own:
            return self._scratch if last else 0
        # It is sent to its owner, and then dropped.
        size = self._kept.pop(name)
        self.held.gradients -= size
        return size + self._scratch

    def step(self) -> int:
        self._kept.clear()
        if self._reducer is not None:
            self._reducer.drop()
        self.held.gradients = 0
        return self._scratch


def owned(parameters: Sequence[ParameterSize], world_size: int) -> list[list[ParameterSize]]:
    """Return the parameters that each rank owns: as OSS does it, the next one goes to the rank with fewest elements.

    One that is frozen counts as one element. What the optimizer doesn't hold comes last.
    """
    parts: list[list[ParameterSize]] = [[] for _ in range(world_size)]
    ranks = [(0, rank) for rank in range(world_size)]
    for value in sorted(parameters, key=lambda value: not value.updated):
        size, rank = ranks[0]
        parts[rank].append(value)
        heapq.heapreplace(ranks, (size + (value.elements if value.trainable else 1), rank))
    return parts


def _burden(part: Sequence[ParameterSize]) -> int:
    """Return about what a rank holds for these parameters: a gradient, and two moments of those that are updated."""
    return sum(value.nbytes * (3 if value.updated else 1) for value in part if value.trainable)
