"""One meaning for buffers under every backend: after a step they are rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor, nn


class Buffers:
    """The buffers of a module, such as the statistics of BatchNorm.

    Each rank's forward updates its own from its own part of the batch. After a step all take the values of rank 0,
    which is what DistributedDataParallel does before the next forward, so that ranks agree when they evaluate or save.
    """

    def __init__(self, module: nn.Module) -> None:
        # By place, not by tensor: a module may put another tensor there.
        self._places = [
            (part._buffers, name)
            for part in module.modules()
            for name, value in part._buffers.items()
            if value is not None and value.numel() > 0
        ]
        self._seen = [self._state(*place) for place in self._places]

    def synchronize(self) -> None:
        """Give every rank rank 0's values of those that changed on any rank since the last time. Collective."""
        if not self._places:
            return
        states = [self._state(*place) for place in self._places]
        device = self._places[0][0][self._places[0][1]].device  # type: ignore[union-attr]
        flags = [state != seen for state, seen in zip(states, self._seen, strict=True)]
        changed = torch.tensor(flags, dtype=torch.uint8, device=device)
        dist.all_reduce(changed, dist.ReduceOp.MAX)
        values = [holder[name] for (holder, name), flag in zip(self._places, changed.tolist(), strict=True) if flag]
        if values:
            broadcast([value for value in values if value is not None])
            states = [self._state(*place) for place in self._places]
        self._seen = states

    @staticmethod
    def _state(holder: dict[str, Tensor | None], name: str) -> tuple[int, int]:
        value = holder[name]
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
