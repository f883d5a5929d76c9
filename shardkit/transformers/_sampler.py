"""Samplers that give every rank the same order, where the library's own may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class OrderOfRankZero(Sampler[int]):
    """Draws in the order that rank 0 draws. Its iteration begins collectively.

    The library shares out one order among the ranks, and has each draw it by itself. ``LengthGroupedSampler`` draws
    from the rank's own random numbers, which part when models do, as with dropout on samples of different lengths:
    then some samples would be drawn twice and others never.
    """

    def __init__(self, sampler: LengthGroupedSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        # Each rank draws, so that its random numbers go on as under the library.
        order = [list(self.sampler)]
        broadcast_object_list(order)
        return iter(order[0])


def alike(sampler: Any) -> Any:
    """Return a sampler of the library's that draws the same on every rank."""
    return OrderOfRankZero(sampler) if isinstance(sampler, LengthGroupedSampler) else sampler
