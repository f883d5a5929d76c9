"""What the fullest rank holds under FairScale, without importing it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shardkit import Footprint, ModelSize, Stepped
from shardkit.averaging import ReducerFootprint

if TYPE_CHECKING:
    from shardkit import ParameterSize
    from shardkit_fairscale import FairScaleOptions

IN_FLIGHT = 16 * 2**20
"""Bytes of gradients on their way to their owners from which on the engine waits for some to arrive."""

_SCRATCH = 2 * 2**20
"""What gloo takes for itself in a reduction, at most: two pieces of 1 MiB. Measured with torch 2.13."""


@final
class FairScaleFootprint(Footprint):
    """Whole weights; the state of the parameters that the rank owns, and their gradients at the end of a window."""

    def __init__(self, model: ModelSize, options: FairScaleOptions) -> None:
        super().__init__(model)
        self.held.parameters = sum(value.nbytes for value in model.parameters)
        trainable = [value for value in model.parameters if value.trainable]
        trained = sum(value.nbytes for value in trainable)
        parts = owned(model.parameters, model.world_size)
        own = max(parts, key=_burden)
        self._stepped = [Stepped(value.shape, value.name) for value in own if value.updated and value.trainable]
        self._own = {value.name for value in own}
        self._kept: dict[str, int] = {}
        self._sent: deque[tuple[str, int]] = deque()
        self._in_flight = 0
        self._coming = {value.name for value in trainable}
        # OSS moves the parameters into one buffer for each rank, one after the other.
        self._prepare = max(sum(value.nbytes for value in part if value.trainable) for part in parts)
        self._reducer: ReducerFootprint | None = None
        distributed = model.world_size > 1
        self._scratch = min(_SCRATCH, trained) if distributed and model.device == "cpu" else 0
        self._sharded = distributed and options.shard == "gradients"
        if distributed and not self._sharded:
            self._reducer = ReducerFootprint(trainable, bucket_cap_mb=options.bucket_cap_mb)
            self.held.buffers = self._reducer.buffers
            # To find its buckets, zeros are averaged in all of them.
            largest = max((value.nbytes for value in trainable), default=0)
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
        size = self._kept[name] = self._kept.get(name, 0) + nbytes
        self.held.gradients += nbytes
        if not last or not self._sharded:
            return 0
        most = self.held.gradients
        # On their way to their owners as many as the engine lets be, as where the network is slower than the model.
        self._arrive(IN_FLIGHT)
        self._sent.append((name, size))
        self._in_flight += size
        self._coming.discard(name)
        if not self._coming:
            # The pass ends when all have arrived.
            self._arrive(0)
        return most - self.held.gradients + self._scratch

    def _arrive(self, left: int) -> None:
        while self._in_flight > left:
            name, size = self._sent.popleft()
            self._in_flight -= size
            if name not in self._own:
                self.held.gradients -= size

    def step(self) -> int:
        self._kept.clear()
        self._arrive(0)
        self._coming = {value.name for value in self.model.parameters if value.trainable}
        if self._reducer is not None:
            self._reducer.drop()
        self.held.gradients = 0
        return self._scratch


@final
class FullyShardedFootprint(Footprint):
    """A rank's runs of weights and state; weights and gradients whole while a window passes."""

    def __init__(self, model: ModelSize) -> None:
        super().__init__(model)
        self._runs = {value.name: math.ceil(value.elements / model.world_size) for value in model.parameters}
        self._own = sum(self._runs[value.name] * value.itemsize for value in model.parameters)
        self._whole = sum(value.nbytes for value in model.parameters)
        self._largest = max((value.nbytes for value in model.parameters), default=0)
        self.held.parameters = self._own

    def stepped(self) -> Sequence[Stepped]:
        return [
            Stepped((self._runs[value.name],), value.name)
            for value in self.model.parameters
            if value.updated and value.trainable
        ]

    def forward(self, names: Sequence[str]) -> int:
        self.held.parameters = self._own + self._whole
        return 0

    def step(self) -> int:
        before = self.held.total
        self.held.parameters, self.held.gradients = self._own, 0
        # Each gradient is filled up to be cut into equal runs, beside all others that are whole.
        return before - self._whole + self._largest - self.held.total


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
