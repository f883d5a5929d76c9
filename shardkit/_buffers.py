"""One meaning for buffers under every backend: after a step they are rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from torch import Tensor, nn


class Buffers:
    """The buffers of a module, such as the statistics of BatchNorm.

    Each rank's forward updates its own from its own part of the batch. After a step all take the values of rank 0,
    which is what DistributedDataParallel does before the next forward, so that ranks agree when they evaluate or save.
    """

    def __init__(self, module: nn.Module) -> None:
        # By place, not by tensor: a module may put another tensor there.
        places: list[tuple[nn.Module, str]] = [
            (part, name)
            for part in module.modules()
            for name, value in part._buffers.items()
            if value is not None and value.numel() > 0
        ]
        # The kernels of batch and instance norm write running statistics without counting a version, also those of a
        # module that calls them by itself: such go by these names.
        self._statistics = [place for place in places if _is_statistic(*place)]
        self._others = [place for place in places if not _is_statistic(*place)]
        self._seen = [_version(*place) for place in self._others]

    def synchronize(self) -> None:
        """Give every rank rank 0's values of those that may have changed since the last time. Collective."""
        places = [*self._statistics, *self._changed()] if self._others else self._statistics
        values = [value for part, name in places if (value := part._buffers[name]) is not None]
        if values:
            broadcast(values)
            self._seen = [_version(*place) for place in self._others]

    def _changed(self) -> list[tuple[nn.Module, str]]:
        """Return the places whose tensor another one replaced, or something wrote to, on any rank."""
        versions = [_version(*place) for place in self._others]
        flags = [version != seen for version, seen in zip(versions, self._seen, strict=True)]
        part, name = self._others[0]
        first = part._buffers[name]
        told = torch.tensor(flags, dtype=torch.uint8, device=first.device if first is not None else None)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [place for place, flag in zip(self._others, told.tolist(), strict=True) if flag]


def _is_statistic(part: nn.Module, name: str) -> bool:
    return isinstance(part, _NormBase) or name in ("running_mean", "running_var")


def _version(part: nn.Module, name: str) -> tuple[int, int]:
    value = part._buffers[name]
    return id(value), -1 if value is None else value._version


@torch.no_grad()
def broadcast(values: list[Tensor]) -> None:
    """Give every rank rank 0's values of these tensors, in place, one collective per dtype. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for value in values:
        by_dtype.setdefault(value.dtype, []).append(value)
    for group in by_dtype.values():
        flat = torch.cat([value.reshape(-1) for value in group])
        dist.broadcast(flat, src=0)
        if dist.get_rank() != 0:
            for value, part in zip(group, flat.split([value.numel() for value in group]), strict=True):
                value.copy_(part.view(value.shape))


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, one tensor at a time. Collective.

    Peak extra memory is one tensor, and that only where it isn't contiguous.
    """
    for value in [*module.parameters(), *module.buffers()]:
        if value.numel() == 0:
            continue
        data = value.detach()
        whole = data if data.is_contiguous() else data.contiguous()
        # Complex numbers travel as pairs of real ones: gloo has no complex type.
        dist.broadcast(torch.view_as_real(whole) if whole.is_complex() else whole, src=0)
        if whole is not data:
            data.copy_(whole)
