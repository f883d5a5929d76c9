"""fully_shard's units: when they gather, give up and average, in lockstep with the other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

    from shardkit.lockstep import Lockstep
    from shardkit_fsdp._held import Held


class Shared:
    """What the units of one session have in common."""

    def __init__(self, count: int, lockstep: Lockstep | None) -> None:
        self.lockstep = lockstep
        self.running = False
        """Whether a backward of the session runs."""
        self.whole = False
        """Whether all is gathered, and stays."""
        self.exact = False
        """Whether what is gathered in low precision for a pass is gathered in float32."""
        self.seen = bytearray(count)
        """By the number of a parameter: whether it got a gradient on this rank in this window."""
        self.root: State


class Group(FSDPParamGroup):
    """The parameters of one unit, gathered and averaged together."""

    shared: Shared
    state: State
    number: int
    fsdp_params: list[Held]  # type: ignore[assignment]
    touched: bool
    """Whether a backward came to it."""
    thawed: int
    """How many parameters were thawed that were frozen at first."""

    def take(self, shared: Shared, state: State, number: int) -> None:
        self.shared, self.state, self.number, self.touched, self.thawed = shared, state, number, False, 0

    @property
    def is_whole(self) -> bool:
        return self.shared.whole

    @property
    def exact(self) -> bool:
        return self.shared.exact

    def hide(self) -> None:
        for held in self.fsdp_params:
            held.hide()

    def show(self) -> None:
        for held in self.fsdp_params:
            held.show()

    def gather_now(self) -> None:
        """Gather outside of the unit's own pass. Collective, unless it is gathered."""
        self.unshard()
        self.wait_for_unshard()
        self.show()

    def reshard_now(self) -> None:
        """Give up what is gathered, whatever state a pass is in."""
        self._to_sharded()

    def owns(self, out: Any) -> bool:
        """Return whether a tensor lies in the memory of what is gathered."""
        if not isinstance(out, Tensor) or out.layout is not torch.strided:
            return False
        if hasattr(out, "_shardkit_held"):
            return any(out is held.value for held in self.fsdp_params)
        place = out.untyped_storage().data_ptr()
        return place != 0 and any(
            held.all_gather_outputs[0].untyped_storage().data_ptr() == place for held in self.fsdp_params
        )

    def _enter(self, what: int) -> None:
        if self.shared.lockstep is not None and not self.shared.whole:
            self.shared.lockstep.enter(self.number * 3 + what)

    # What fully_shard calls.

    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None or self.is_unsharded:
            return
        self._enter(1 if self._training_state == TrainingState.PRE_BACKWARD else 0)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        super().wait_for_unshard()
        if self.device.type == "cpu":
            # Kept for a copy that runs beside the next gather, which here comes after it.
            self.comm_ctx.all_gather_state = None

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.state.begin()
        given = super().pre_forward(module, args, kwargs)
        self.show()
        return given

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._refuse_views(output)
            self.reshard()
            if torch.is_grad_enabled():
                self._record_post_forward()
            if not self.shared.whole:
                self.hide()
        self._training_state = TrainingState.IDLE
        return output

    def _refuse_views(self, output: Any) -> None:
        if self.shared.whole:
            return
        for out in tensors(output):
            if (out._base is not None or hasattr(out, "_shardkit_held")) and self.owns(out):
                raise UnsupportedError(
                    f"backend 'fsdp' shards parameters while their module doesn't run, and "
                    f"{self._module_fqn or 'the model'!r} returns one of its own, or a view of one: return a clone, or "
                    "use zero or ddp"
                )

    def reshard(self) -> None:
        if not self.shared.whole:
            super().reshard()

    def _to_sharded(self) -> None:
        if not self.shared.whole:
            super()._to_sharded()  # type: ignore[no-untyped-call]

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if self._training_state == TrainingState.PRE_BACKWARD:
            return
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backend 'fsdp' shards a parameter while its module doesn't run, so that it can't go back through a "
                "gradient (second derivatives, create_graph=True): use zero or ddp"
            )
        self.touched = True
        if self.is_unsharded:
            self._enter(1)
        super().pre_backward(default_prefetch and self.device.type != "cpu", *unused)
        self.show()

    def post_backward(self, *unused: Any) -> None:
        if not self.shared.running:
            # Another session's backward, which came through this module, or the user's own: what it left in the
            # parameters is whole, and counts if it is there in the next backward of this session.
            self._training_state = TrainingState.POST_BACKWARD
            self.reshard()
            return
        found = self.touched
        seen = self.shared.seen
        for held in self.fsdp_params:
            gradient = held.value.grad
            if held.value.requires_grad and not held.trains:
                # Thawed since; on all ranks, or they part at a gate.
                held.trains = True
                self.thawed += 1
            if gradient is not None:
                found = True
                seen[held.index] = 1
                if gradient.is_sparse:
                    # Other ranks may have a dense one, or none.
                    held.value.grad = gradient.to_dense()
        if not found:
            self._training_state = TrainingState.POST_BACKWARD
            self.reshard()
            return
        for held in self.fsdp_params:
            if held.trains and held.value.grad is None:
                # Another rank may have one.
                held.value.grad = held.zeros()
        self._enter(2 + (self.thawed << 32))
        super().post_backward(*unused)

    def finalize_backward(self) -> None:
        super().finalize_backward()  # type: ignore[no-untyped-call]
        self.touched = False

    def drop(self) -> None:
        """Forget the gradients of a window."""
        for held in self.fsdp_params:
            held.sharded_param.grad = None
            if held.value.grad is not None:
                held.value.grad = None
        self.touched = False


class State(FSDPState):
    """A unit's place in the passes."""

    shared: Shared
    _first_node = 0
    """The number that autograd gave the first operation of the forward in progress."""

    def begin(self) -> None:
        """Take note that a forward begins."""
        self._first_node = torch._C._autograd._get_sequence_nr()

    def _register_root_post_backward_final_callback(self) -> None:
        # A backward within the backward has an end of its own, which isn't that of the session's.
        if not self.shared.running:
            super()._register_root_post_backward_final_callback()  # type: ignore[no-untyped-call]

    def _register_pre_backward_hook(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        for out in tensors(output):
            if out.requires_grad:
                out.register_hook(self._pre_backward)
                node = None if out._base is None else out._base.grad_fn
                if node is not None and node._sequence_nr() >= self._first_node:
                    # What is written in place into a view gives the view another graph, in which only its base's is
                    # kept. A base from before the unit ran has nothing of it.
                    node.register_prehook(self._before_base)
        return output

    def _before_base(self, gradients: Any) -> None:
        self._pre_backward(gradients)


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors within what a module returned: containers, dataclasses, objects of the user's own."""
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | complex | bool | type):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item, seen)
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from tensors(item, seen)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None), seen)
    elif not isinstance(value, torch.nn.Module) and not callable(value):
        for item in getattr(value, "__dict__", {}).values():
            yield from tensors(item, seen)
