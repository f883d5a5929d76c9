"""Averaging gradients after the backward pass, without hooks in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""How much is averaged in one collective, which needs as much memory: torch's own choice for its buckets."""


@torch.no_grad()
def average(parameters: Sequence[Tensor]) -> None:
    """Average the gradients over the ranks, in place. Collective.

    A rank without a gradient that another one has counts as zero; one that no rank has stays None.
    """
    if not parameters:
        return
    have = torch.tensor(
        [value.grad is not None for value in parameters], dtype=torch.uint8, device=parameters[0].device
    )
    dist.all_reduce(have, dist.ReduceOp.MAX)
    for bucket in _buckets([value for value, flag in zip(parameters, have.tolist(), strict=True) if flag]):
        for value in bucket:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        gradients = [value.grad for value in bucket if value.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of parameters of one dtype that together fit a bucket."""
    bucket: list[Tensor] = []
    for value in parameters:
        size = sum(other.nbytes for other in bucket) + value.nbytes
        if bucket and (bucket[0].dtype != value.dtype or size > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(value)
    if bucket:
        yield bucket
