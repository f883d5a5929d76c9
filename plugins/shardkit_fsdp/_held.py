"""The user's own parameters as what fully_shard gathers into, empty and guarded while they are in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage, free_storage

from shardkit_fsdp._lowered import lowered_kind
from shardkit_fsdp._sharded import sharded_kind

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit_fsdp._unit import Group


class Held(FSDPParam):
    """fully_shard's record of one parameter, whose gathered form is the user's own object.

    fully_shard puts other tensors into the module, so that hooks, references and optimizers of the user's would miss
    what is trained. Here the user's parameter stays in its place. While it is in shards it has a shape and no memory,
    and its class is one that knows what may be done with it; gathered it is what it was.
    """

    value: nn.Parameter
    index: int
    """Its number among all."""
    home: Group
    shape: torch.Size
    stride: tuple[int, ...]
    """As the user had it in memory."""
    start: int
    """The first element of this rank's shard."""
    local: Tensor
    """This rank's shard, flat."""
    plain: type
    trains: bool
    """Whether its gradient is averaged: since it was trainable."""
    kind: type
    """The class of the parameter while it is in shards."""
    shown: type
    """Its class while it is whole and a pass runs."""
    low: torch.dtype | None
    """What it is gathered in for a pass; None where that is its own type."""

    def take(
        self,
        value: nn.Parameter,
        shape: torch.Size,
        stride: tuple[int, ...],
        index: int,
        home: Group,
        low: torch.dtype | None,
    ) -> None:
        """Have the user's parameter take the place of what fully_shard gathers into."""
        # Those of one dimension, of norms and biases, are few bytes, and what uses them computes in float32.
        self.low = low if value.dtype is torch.float32 and len(shape) > 1 else None
        self.value, self.index, self.home, self.shape, self.stride = value, index, home, shape, stride
        size, rank = self._shard_mesh.size(), self._shard_mesh.get_local_rank()
        padded: Tensor = self._sharded_param_data
        total = shape.numel()
        self.start = min(rank * padded.numel(), total)
        self.local = padded[: min(padded.numel(), total - self.start)]
        self._room = padded.numel() * size
        self._passing = self._allocated(self.low or padded.dtype)
        self.all_gather_outputs = [self._passing]
        self._view = self._passing_view = self._viewed(self._passing)
        free_storage(self._passing)
        # One number for all elements: what reads them in spite of all gets no number, and what writes fails.
        number = torch.nan if value.is_floating_point() or value.is_complex() else 0
        self._stub = torch.full((), number, dtype=padded.dtype, device=self.device).expand(shape)
        self._unsharded_param = value
        self.trains = value.requires_grad
        self.plain = type(value)
        self.kind = sharded_kind(self.plain)
        self.shown = self.plain if self.low is None else lowered_kind(self.plain)
        value._shardkit_held = self  # type: ignore[attr-defined]
        value.data = self._stub
        value.__class__ = self.kind

    def _allocated(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._room, dtype=dtype, device=self.device)

    def _viewed(self, gathered: Tensor) -> Tensor:
        return torch.as_strided(gathered, self.shape, torch.empty(self.shape, device="meta").stride(), 0)

    @property
    def _is_low(self) -> bool:
        return self.low is not None and not self.home.exact

    def lowered(self, dtype: torch.dtype | None) -> Tensor:
        """Return what is gathered, in float32 a copy of it."""
        if dtype is torch.float32:
            return self._view.float()
        # A tensor of its own over the same memory, which is there again when a backward looks at it.
        view = self._view
        alone = torch.empty(0, dtype=view.dtype, device=self.device)
        return alone.set_(view.untyped_storage(), 0, view.size(), view.stride())

    def let_go(self, whole: Tensor) -> None:
        """Give the user's parameter back, with the whole of its values."""
        value = self.value
        value.__class__ = self.plain
        del value._shardkit_held  # type: ignore[attr-defined]
        if whole.untyped_storage().nbytes() != self.shape.numel() * whole.itemsize:
            whole = whole[: self.shape.numel()].clone()
        whole = whole.view(self.shape)
        if whole.stride() != self.stride:
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        value.data = whole

    def show(self) -> None:
        """Let the parameter be used as what it is."""
        value = self.value
        shown = self.shown if self._is_low else self.plain
        if type(value) is shown:
            return
        if type(value) not in (self.plain, self.shown):
            # It may be armed, by those who guard its gradient.
            self.kind = type(value)
        value.__class__ = shown

    def hide(self) -> None:
        """Have its class guard the parameter."""
        self.value.__class__ = self.kind

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the averaged gradient, flat."""
        held: Any = self.sharded_param.grad
        return None if held is None else held._local_tensor.view(-1)[: self.local.numel()]

    # What fully_shard calls.

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        """Leave the user's parameter where it is."""

    def init_unsharded_param(self) -> None:
        """The user's own is there."""

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = self.low

    def to_unsharded(self) -> None:
        self.show()
        if not self._is_low:
            self.value.data = self._view
        self.sharded_state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        self.show()
        if not self._is_low:
            self.value.data = self._stub
        self.hide()
        if self.all_gather_outputs[0] is self._passing:
            free_storage(self._passing)
        self.sharded_state = ShardedState.SHARDED

    def alloc_all_gather_outputs(self) -> None:
        if self.all_gather_outputs[0] is self._passing:
            alloc_storage(self._passing)

    def exactly(self, exact: bool) -> None:
        """Have it gathered in float32 from here on, or no more. It is in shards."""
        if self.low is None:
            return
        self.param_dtype = None if exact else self.low
        # Memory that isn't given up under a graph of that time, whose backward would gather in low precision.
        gathered = self._allocated(torch.float32) if exact else self._passing
        self.all_gather_outputs = [gathered]
        self._view = self._viewed(gathered) if exact else self._passing_view

    def reset_sharded_param(self) -> None:
        """Nobody else changes it."""

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        # A 0-dim parameter is one of one element to fully_shard.
        return grad.view(1) if grad.dim() == 0 else grad

    def zeros(self) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros(self.shape, dtype=self.local.dtype, device=self.device)
