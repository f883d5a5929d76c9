"""How gradients are averaged: to each parameter's owner, or to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shardkit.averaging import Reducer as TorchReducer
from shardkit.errors import UnsupportedError
from shardkit_fairscale._library import ShardedDataParallel, Workhandle, unconfigured_logging

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardkit_fairscale._shard import Shards


class Reducer(Protocol):
    """Averages over the ranks the gradients of the parameters in ``schedule``, while the last backward runs.

    What happened in it that other ranks must hear of it leaves behind: ``absent``, parameters of the schedule that had
    no gradient here and got zeros; ``repeated`` and ``sparse``, parameters whose gradient came in pieces or was sparse,
    and can't be right.
    """

    sharded: bool
    """Whether an averaged gradient is only at its owner."""
    schedule: list[Tensor]
    absent: set[Tensor]
    repeated: set[Tensor]
    sparse: set[Tensor]
    arrived: dict[Tensor, None]
    """The order in which gradients came in the last backward, where the order of the schedule should follow it."""

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Run the window's last backward, and average what it and those before it left. Collective."""

    def refresh(self, schedule: list[Tensor]) -> None:
        """Take up another schedule, the same on every rank, after parameters were frozen or thawed."""

    def reorder(self, schedule: list[Tensor]) -> None:
        """Take up another schedule, the same on every rank, of parameters trainable since the last ``refresh``."""

    def recall(self, schedule: list[Tensor]) -> None:
        """Take up the schedule of an earlier run, whatever is trainable by now. Collective."""

    def drop(self) -> None:
        """Drop the gradients of the schedule, and what memory they needed. Collective."""

    def close(self) -> None:
        """Remove all hooks."""


class ShardedReducer(ShardedDataParallel):  # type: ignore[misc]
    """FairScale's ShardedDDP, with reductions that start in one order on every rank.

    ShardedDDP reduces a gradient when its hook fires: where ranks use different parameters, or the same ones in another
    order, their reductions meet the wrong ones, and they hang or add up different tensors without a word. Here a
    reduction starts once all before it in the schedule have started; what hasn't come by the end of the backward is
    zeros.

    FairScale's buckets stay off: they hold every rank's gradients all the time, and a gradient in a bucket that is
    dropped once is never averaged again. Small gradients travel together all the same, in parcels of up to
    ``buffer_size`` elements with one owner, that last as long as the gradients do.
    """

    sharded = True

    def __init__(self, model: nn.Module, shard: Shards, names: Mapping[Tensor, str], buffer_size: int) -> None:
        self._launch: dict[Tensor, Callable[[], None]] = {}
        self._armed = False
        with unconfigured_logging():
            super().__init__(
                model,
                shard.oss,
                broadcast_buffers=False,
                sync_models_at_startup=False,
                reduce_buffer_size=0,
                auto_refresh_trainable=False,
                reduce_fp16=False,
            )
        self._shard = shard
        self._names = names
        self._buffer_size = buffer_size
        # Gradients come in about the reverse order of the forward pass; the first window shows in which exactly.
        self.refresh([parameter for parameter in reversed(list(names)) if parameter.requires_grad])

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        self._clear_counters()
        # FairScale would wait for its reductions in a callback of the backward pass, of the innermost one at that.
        self._bucket_flush_callback_set = True
        self._begin()
        self._armed = True
        try:
            loss.backward(gradient)
        finally:
            self._armed = False
        with torch.no_grad():
            for parcel in self._parcels[self._next :]:
                for parameter in parcel:
                    if parameter.grad is None:
                        self.absent.add(parameter)
                        parameter.grad = torch.zeros_like(parameter)
                self._start(parcel)
            self._consume_work_handles()

    def refresh(self, schedule: list[Tensor]) -> None:
        # The part of ``refresh_trainable`` that is left: it would also copy the parameters into new buffers once more.
        self._trainable_params = [parameter for parameter in self._names if parameter.requires_grad]
        self._trainable_param_to_rank = {
            parameter: self._shard.owner(parameter) for parameter in self._trainable_params
        }
        self._launch.clear()
        self._work_handles.clear()
        self._setup_backward_hooks()
        self.reorder(schedule)
        self._begin()

    def reorder(self, schedule: list[Tensor]) -> None:
        self.schedule = schedule
        self._parcels: list[list[Tensor]] = []
        room: dict[int, int] = {}
        filling: dict[int, list[Tensor]] = {}
        for parameter in schedule:
            owner, size = self._shard.owner(parameter), parameter.numel()
            if size > self._buffer_size:
                self._parcels.append([parameter])
            elif owner in filling and room[owner] >= size:
                filling[owner].append(parameter)
                room[owner] -= size
            else:
                filling[owner] = [parameter]
                room[owner] = self._buffer_size - size
                self._parcels.append(filling[owner])
        last = {parameter: place for place, parameter in enumerate(schedule)}
        self._parcels.sort(key=lambda parcel: last[parcel[-1]])
        self._place = {parameter: place for place, parcel in enumerate(self._parcels) for parameter in parcel}

    def recall(self, schedule: list[Tensor]) -> None:
        self.reorder([parameter for parameter in schedule if parameter.requires_grad])

    def drop(self) -> None:
        """Leave it: FairScale's gradients have memory of their own."""

    def close(self) -> None:
        while self._grad_hooks:
            self._grad_hooks.pop().remove()
        self._launch.clear()
        # What is left would hold on to the user's parameters.
        for kept in (self._grad_accs, self._manual_reduce, self._trainable_params, self._all_params):
            kept.clear()

    def _begin(self) -> None:
        self._next = 0
        self._missing = [len(parcel) for parcel in self._parcels]
        self.arrived: dict[Tensor, None] = {}
        self.absent: set[Tensor] = set()
        self.repeated: set[Tensor] = set()
        self.sparse: set[Tensor] = set()

    def _get_reduce_fn(self, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
        self._launch[param] = super()._get_reduce_fn(index, param, dst_rank)

        def arrive(*_: Any) -> None:
            if self._armed:
                self._arrive(param)

        return arrive

    def _arrive(self, parameter: Tensor) -> None:
        place = self._place.get(parameter)
        if place is None:
            return
        if parameter in self.arrived:
            self.repeated.add(parameter)
            return
        self.arrived[parameter] = None
        self._missing[place] -= 1
        while self._next < len(self._parcels) and not self._missing[self._next]:
            self._start(self._parcels[self._next])
            self._next += 1

    @torch.no_grad()
    def _start(self, parcel: list[Tensor]) -> None:
        for parameter in parcel:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                self.sparse.add(parameter)
                parameter.grad = torch.zeros_like(parameter)
        if len(parcel) > 1:
            self._send(parcel)
        elif parcel[0].numel() > 0:
            self._launch[parcel[0]]()

    def _send(self, parcel: list[Tensor]) -> None:
        owner = self._shard.owner(parcel[0])
        whole = torch.cat([parameter.grad.reshape(-1) for parameter in parcel if parameter.grad is not None])
        whole.mul_(self._world_size_scaling)
        for parameter in parcel:
            parameter.grad = None

        def unpack() -> None:
            pieces = whole.split([parameter.numel() for parameter in parcel])
            for parameter, piece in zip(parcel, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

        work = dist.reduce(whole, dst=owner, async_op=True)
        self._work_handles.append(Workhandle(handle=work, callback=unpack if owner == self._rank else None))
        self._try_consume_work_handle()


class ReplicatedReducer:
    """torch's reducer, which averages gradients on all ranks."""

    sharded = False

    def __init__(self, model: nn.Module, names: Mapping[Tensor, str], bucket_cap_mb: float) -> None:
        self._model = model
        self._names = names
        self._bucket_cap_mb = bucket_cap_mb
        self.absent: set[Tensor] = set()
        self.repeated: set[Tensor] = set()
        self.sparse: set[Tensor] = set()
        self.arrived: dict[Tensor, None] = {}
        self._reducer: TorchReducer | None = None
        self.refresh([])
        self.drop()

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        assert self._reducer is not None
        try:
            self._reducer.backward(loss, gradient)
        except RuntimeError as error:
            if "SparseTensorImpl" in str(error):
                raise UnsupportedError(
                    "backend 'fairscale' with shard=optimizer can't average a sparse gradient that no module's setting "
                    "told of: make it dense, or use the strategy 'ddp'"
                ) from error
            if "mark a variable ready only once" not in str(error):
                raise
            raise UnsupportedError(
                "backend 'fairscale' with shard=optimizer can't follow a backward pass within another: checkpoint "
                "with use_reentrant=False, or use the strategy 'fairscale' or 'ddp:overlap=false'"
            ) from error

    def recall(self, schedule: list[Tensor]) -> None:
        reduced = set(schedule)
        trainable = [parameter.requires_grad for parameter in self._names]
        try:
            # Its buckets are of those parameters that are trainable when it is built.
            for parameter in self._names:
                parameter.requires_grad_(parameter in reduced)
            self.refresh(schedule)
            self.drop()
        finally:
            for parameter, flag in zip(self._names, trainable, strict=True):
                parameter.requires_grad_(flag)

    def refresh(self, schedule: Sequence[Tensor]) -> None:
        self.schedule = [parameter for parameter in self._names if parameter.requires_grad]
        self.close()
        self._reducer = TorchReducer(self._model, bucket_cap_mb=self._bucket_cap_mb)

    def drop(self) -> None:
        if self._reducer is not None:
            self._reducer.drop()

    def reorder(self, schedule: Sequence[Tensor]) -> None:
        """Leave it: DistributedDataParallel has an order of its own."""

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
