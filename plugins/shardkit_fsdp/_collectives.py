"""How shards travel: as bytes, over any backend of torch.distributed, and so that a wait in vain ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit.lockstep import reduce_scatter_in_place, watched

if TYPE_CHECKING:
    from torch import Tensor

_gather = watched(dist.all_gather_single)


class _Allocation:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocation):
    """What fully_shard gathers with over gloo, which knows neither complex numbers nor an end of its patience."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return _gather(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group=group, async_op=async_op)


class Scatter(_Allocation):
    """What fully_shard averages gradients with over gloo: in the memory of what it is given, of which it has no need
    then."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if input_tensor.is_complex():
            output_tensor, input_tensor = torch.view_as_real(output_tensor), torch.view_as_real(input_tensor)
        return reduce_scatter_in_place(output_tensor, input_tensor, op, group=group, async_op=async_op)


@torch.no_grad()
def whole(shard: Tensor) -> Tensor:
    """Return the shards of all ranks, joined, in one flat tensor. Collective."""
    size = dist.get_world_size()
    joined = torch.empty(shard.numel() * size, dtype=shard.dtype, device=shard.device)
    if size == 1:
        return joined.copy_(shard)
    dist.all_gather_single(joined.view(torch.uint8), shard.view(torch.uint8))
    return joined
