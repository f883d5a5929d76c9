"""The optimizer in shards: each rank holds state for the parameters that it owns, and updates those."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError
from shardkit.optimizers import reach
from shardkit.owners import Part, raise_together
from shardkit.parameters import sharing
from shardkit_zero._footprint import IN_FLIGHT, PARCEL, SMALL
from shardkit_zero._library import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class Shards(ZeroRedundancyOptimizer):
    """Torch's, around copies of the user's optimizer, with parameters that stay in the memory that they have.

    Torch's own ``parameters_as_bucket_view`` moves the parameters into one buffer for each rank: it takes trainable
    ones of one dtype, unties those that share memory, and goes on sending what was in the buffer when the user gives a
    parameter other memory. Without it torch sends each by itself, frozen ones too. Here small ones travel together, in
    copies, and large ones as they are.
    """

    optim: Optimizer
    _param_to_rank: dict[Tensor, int]
    _default_device: torch.device

    def __init__(self, names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
        held = {value for group in optimizer.param_groups for value in group["params"]}
        pair = sharing({name: value for value, name in names.items() if value in held})
        if pair is not None:
            raise UnsupportedError(
                f"backend 'zero' gives each parameter one rank that updates it, and {pair[0]!r} and {pair[1]!r} share "
                "memory, where the updates of two would meet: make them one parameter, or use the strategy 'ddp'"
            )
        found = reach(optimizer)
        if found.unit == "model":
            raise UnsupportedError(
                f"backend 'zero' splits the parameters over the ranks, and {type(optimizer).__name__} "
                f"{found.cause}: use the strategy 'ddp', where it sees the whole model"
            )
        self._part = Part("zero", optimizer, names)
        groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, optimizer_class=self._part.over)  # type: ignore[arg-type]
        owners = self._param_to_rank
        self.owned: list[Tensor] = [value for value in owners if owners[value] == self.rank]
        # How many ranks failed, and how many changed a parameter that has no gradient.
        self._told = torch.zeros(2, device=self._default_device)
        self._part.carry_over(lambda value: owners.get(value, 0))

    def update(self) -> None:
        """Update the parameters that this rank owns, and take the others' from their owners. Collective.

        An error of the optimizer on one rank is raised on all.
        """
        used = [value for value in self._param_to_rank if value.grad is not None]
        unused = [(value, value._version) for value in self.owned if value.grad is None]
        error = None
        try:
            self._part.begin(self.param_groups)
            self._local_step()
        except Exception as caught:
            error = caught
        # Only the owner of a parameter sees that its settings are bad: all must hear of it, or wait for its weights.
        self._told[0] = error is not None
        self._told[1] = any(value._version != before for value, before in unused)
        work = dist.all_reduce(self._told, async_op=True)
        self._send(used)
        work.wait()
        failed, strayed = self._told.tolist()
        if failed:
            raise_together(error)
        if strayed:
            self._send(value for value in self._param_to_rank if value.grad is None)
        self._part.end()

    @torch.no_grad()
    def _send(self, values: Iterable[Tensor]) -> None:
        """Give all ranks the owners' values of these parameters. Collective."""
        sent: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
        held = 0
        for owner, parcel in self._parcels(values):
            whole = parcel[0].detach()
            if len(parcel) == 1 and whole.is_contiguous():
                parcel = []
            else:
                whole = torch.cat([value.reshape(-1) for value in parcel])
                held += whole.nbytes
            while sent and held > IN_FLIGHT:
                held -= _arrived(*sent.popleft())
            work = dist.broadcast(whole, owner, async_op=True)
            assert work is not None
            sent.append((work, whole, parcel))
        for item in sent:
            _arrived(*item)

    def _parcels(self, values: Iterable[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield those that travel together, and their owner, in one order on every rank."""
        filling: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        room: dict[tuple[int, torch.dtype], int] = {}
        for value in values:
            owner = self._param_to_rank[value]
            if value.nbytes >= SMALL:
                yield owner, [value]
            elif value.nbytes:
                kind = owner, value.dtype
                if room.get(kind, PARCEL) < value.nbytes:
                    yield owner, filling.pop(kind)
                    room[kind] = PARCEL
                filling.setdefault(kind, []).append(value)
                room[kind] = room.get(kind, PARCEL) - value.nbytes
        for (owner, _), parcel in filling.items():
            yield owner, parcel

    def _verify_same_dense_param_type(self) -> None:
        """Take parameters of any dtypes: no buffer is to hold them."""

    def _get_is_trainable_mask(self) -> list[bool]:
        """Say nothing: torch would log at each change that it builds the buffers anew which there aren't."""
        return []


def _arrived(work: dist.Work, whole: Tensor, parcel: list[Tensor]) -> int:
    """Wait for a parcel, unpack it where it is a copy, and return the bytes of that copy."""
    work.wait()
    if not parcel:
        return 0
    pieces = whole.split([value.numel() for value in parcel])
    torch._foreach_copy_(parcel, [piece.view(value.shape) for value, piece in zip(parcel, pieces, strict=True)])
    return whole.nbytes
