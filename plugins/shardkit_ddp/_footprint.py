"""What a rank holds under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shardkit import Footprint, ModelSize, Stepped
from shardkit.averaging import ReducerFootprint
from shardkit_ddp._average import BUCKET_BYTES
from shardkit_ddp._options import DDPOptions

_SCRATCH = 2 * 2**20
"""What gloo takes for itself in an all-reduce, at most: two pieces of 1 MiB. Measured with torch 2.13."""


@final
class DDPFootprint(Footprint):
    """Whole weights and state; gradients that are copied into the reducer's buckets as they come."""

    def __init__(self, model: ModelSize, options: DDPOptions) -> None:
        super().__init__(model)
        self.held.parameters = sum(value.nbytes for value in model.parameters)
        trainable = [value for value in model.parameters if value.trainable]
        size = sum(value.nbytes for value in trainable)
        self._reducer: ReducerFootprint | None = None
        self._scratch = self._copied = 0
        if model.world_size == 1:
            return
        self._scratch = min(_SCRATCH, size) if model.device == "cpu" else 0
        if options.overlap:
            self._reducer = ReducerFootprint(
                trainable,
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
            )
            self.held.buffers = self._reducer.buffers
        else:
            # Small gradients are put together to be averaged.
            self._copied = min(BUCKET_BYTES, size)

    def stepped(self) -> Sequence[Stepped]:
        return [
            Stepped(value.shape, value.name) for value in self.model.parameters if value.updated and value.trainable
        ]

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        if self._reducer is None:
            self.held.gradients += nbytes
            return 0
        passing = self._reducer.ready(name, nbytes, last=last)
        self.held.gradients = self._reducer.gradients
        return max(passing, self._scratch) if last else 0

    def step(self) -> int:
        if self._reducer is not None:
            self._reducer.drop()
        self.held.gradients = 0
        return self._copied + self._scratch
