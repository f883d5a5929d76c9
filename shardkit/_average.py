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


class Kinds:
    """What gradients there are on any rank. Collective."""

    special: bool
    """Whether any rank's is sparse, or its caller says so."""
    apart: bool
    """Whether a parameter is trainable on some ranks only."""

    def __init__(self, parameters: Sequence[Tensor], *, special: bool = False) -> None:
        self._parameters = parameters
        self._dense: list[int] = []
        self._sparse: list[int] = []
        self.special = self.apart = False
        if not parameters:
            return
        dense = [value.grad is not None and not value.grad.is_sparse for value in parameters]
        sparse = [value.grad.sparse_dim() if value.grad is not None else 0 for value in parameters]
        trained = [value.requires_grad for value in parameters]
        frozen = [not flag for flag in trained]
        facts = [*dense, *sparse, *trained, *frozen, special]
        have = torch.tensor(facts, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(have, dist.ReduceOp.MAX)
        told = have.tolist()
        count = len(parameters)
        self._dense, self._sparse, trained, frozen = (told[at * count : (at + 1) * count] for at in range(4))
        self.special = any(self._sparse) or bool(told[-1])
        self.apart = any(one and other for one, other in zip(trained, frozen, strict=True))

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients over the ranks, in place. Collective.

        A rank without a gradient that another one has counts as zero; one that no rank has stays None. A gradient that
        is sparse on all ranks that have it stays sparse; elsewhere it becomes dense.
        """
        for value, is_dense, sparse_dims in zip(self._parameters, self._dense, self._sparse, strict=True):
            if sparse_dims and not is_dense:
                value.grad = _sparse_average(value, sparse_dims)
        for bucket in _buckets([value for value, flag in zip(self._parameters, self._dense, strict=True) if flag]):
            for value in bucket:
                if value.grad is None:
                    value.grad = torch.zeros_like(value)
                elif value.grad.is_sparse:
                    value.grad = value.grad.to_dense()
            gradients = [value.grad for value in bucket if value.grad is not None]
            _average_together(gradients)


def _average_together(gradients: list[Tensor]) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0])
        gradients[0] /= dist.get_world_size()
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _sparse_average(value: Tensor, dims: int) -> Tensor:
    """Return the average of the sparse gradients of one parameter, from the entries that any rank has. Collective."""
    own = value.grad
    if own is None:
        own = torch.zeros_like(value).to_sparse(dims)
    elif own.sparse_dim() != dims:
        own = own.to_dense().to_sparse(dims)
    own = own.coalesce()
    size = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64, device=value.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([own._nnz()], device=value.device))
    most = max(int(count) for count in counts)
    indices, values = (_gathered(part.contiguous(), most, counts) for part in (own.indices().t(), own.values() / size))
    return torch.sparse_coo_tensor(indices.t(), values, value.shape, check_invariants=False).coalesce()


def _gathered(part: Tensor, most: int, counts: Sequence[Tensor]) -> Tensor:
    padded = part.new_zeros((most, *part.shape[1:]))
    padded[: len(part)] = part
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded)
    return torch.cat([other[: int(count)] for other, count in zip(every, counts, strict=True)])


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
