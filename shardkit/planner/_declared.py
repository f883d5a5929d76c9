"""The footprint of a backend whose plugin doesn't say: from what its variant declares to be sharded and offloaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkit._footprint import Footprint, Stepped


@dataclass
class DeclaredFootprint(Footprint):
    """Even shares of what is sharded, whole copies of what is not; buckets of 25 MiB, torch's own choice."""

    shards: frozenset[str] = field(default=frozenset(), kw_only=True)
    offloads: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        whole = sum(value.nbytes for value in self.model.parameters)
        trained = sum(value.nbytes for value in self.model.parameters if value.trainable)
        self._sizes = {value.name: value.nbytes for value in self.model.parameters}
        self._gathered = 0
        self._parameters = self._share(whole, "parameters")
        place = self.host if "parameters" in self.offloads else self.held
        place.parameters = self._parameters
        self.held.buffers = min(trained, 25 * 2**20)
        self.offloaded_state = "optimizer" in self.offloads

    def _share(self, size: int, kind: str) -> int:
        return math.ceil(size / self.model.world_size) if kind in self.shards else size

    def stepped(self) -> Sequence[Stepped]:
        updated = [value for value in self.model.parameters if value.updated and value.trainable]
        if "optimizer" not in self.shards:
            return [Stepped(value.shape, value.name) for value in updated]
        return [Stepped((math.ceil(value.elements / self.model.world_size),), value.name) for value in updated]

    def forward(self, names: Sequence[str]) -> int:
        self._gather(names)
        return 0

    def backward(self, names: Sequence[str]) -> int:
        self._gather(names)
        return 0

    def _gather(self, names: Sequence[str]) -> None:
        if "parameters" in self.shards:
            self.held.parameters -= self._gathered
            self._gathered = sum(self._sizes[name] for name in names)
            self.held.parameters += self._gathered

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        kept = self._share(nbytes, "gradients") if last else nbytes
        self.held.gradients += kept
        return nbytes - kept

    def step(self) -> int:
        self._gather(())
        self.held.gradients = 0
        return 0
