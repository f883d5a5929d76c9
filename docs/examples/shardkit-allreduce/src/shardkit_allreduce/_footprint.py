"""What a rank holds, for ``shardkit plan``: a simulation of the engine, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shardkit import Footprint, ModelSize, Stepped

if TYPE_CHECKING:
    from shardkit_allreduce import Options

_SCRATCH = 2 * 2**20
"""What gloo takes for itself in an all-reduce, at most. Measured with torch 2.13."""


@final
class AllreduceFootprint(Footprint):
    """Whole weights, gradients and optimizer state on every rank."""

    def __init__(self, model: ModelSize, options: Options) -> None:
        super().__init__(model)
        self.held.parameters = sum(value.nbytes for value in model.parameters)
        trained = [value.nbytes for value in model.parameters if value.trainable]
        # A bucket holds one parameter at least.
        bucket = min(sum(trained), max([int(options.bucket_mb * 2**20), *trained]))
        self._averaging = bucket + min(_SCRATCH, sum(trained)) if model.world_size > 1 else 0

    def stepped(self) -> Sequence[Stepped]:
        return [
            Stepped(value.shape, value.name) for value in self.model.parameters if value.updated and value.trainable
        ]

    def step(self) -> int:
        # The gradients, which the base class counts as they come, are averaged bucket by bucket: by then the
        # activations are gone. Then they are dropped.
        self.held.gradients = 0
        return self._averaging
