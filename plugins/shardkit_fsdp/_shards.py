"""fully_shard over the user's module, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import unsafe_setattr_param

from shardkit.errors import UnsupportedError
from shardkit.lockstep import Lockstep, Words
from shardkit_fsdp._collectives import Gather, Scatter, whole
from shardkit_fsdp._held import Held
from shardkit_fsdp._restore import Restore
from shardkit_fsdp._unit import Group, Shared, State
from shardkit_fsdp._wrap import has_forward, units

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit_fsdp._options import FSDPOptions

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WORDS = Words("backend 'fsdp'", "zero or ddp")


class _Holder(nn.Module):
    """Stands over a list of modules, which has no forward that could be hooked."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held


@final
class Shards:
    """The parameters of a module in shards: each rank holds its rows of each. Collective.

    Where it fails the module is as it was.
    """

    def __init__(self, model: nn.Module, options: FSDPOptions, precision: str) -> None:
        self._model = model
        self._low = _DTYPES[precision] if options.gather == "low" else None
        self._device = next(model.parameters()).device
        self._gloo = self._device.type == "cpu" or dist.get_backend() == "gloo"
        self.names = {id(value): name for name, value in model.named_parameters()}
        self._empty = {value for value in model.parameters() if value.numel() == 0}
        chosen = by_dtype(model, units(model, options.wrap), self._empty)
        self.restore = Restore(model)
        self.held: list[Held] = []
        """In the order of the module's parameters."""
        self.groups: list[Group] = []
        self.lockstep: Lockstep | None = None
        self._shapes = {value: (value.shape, value.stride()) for value in model.parameters()}
        names = {part: name for name, part in model.named_modules()}
        places = [repr(names[part]) if names[part] else type(model).__name__ for part in [*chosen, model]]
        if dist.get_world_size() > 1:
            self.lockstep = Lockstep([f"{what}{name}{when}" for name in places for what, when in _ACTS], _WORDS)
        self.shared = Shared(len(self.names), self.lockstep)
        try:
            self._shard(chosen, options)
        except BaseException:
            self.give_back()
            raise
        self.restore.built()

    def _shard(self, chosen: list[nn.Module], options: FSDPOptions) -> None:
        model = self._model
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self._device.type, (dist.get_world_size(),)),
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
            if options.offload == "cpu"
            else OffloadPolicy(),
            "ignored_params": self._empty,
        }
        order = {value: at for at, value in enumerate(model.parameters())}
        root = model if has_forward(model) else _Holder(model)
        for number, unit in enumerate([*chosen, root]):
            homes = [
                (part, name, value)
                for part in unit.modules()
                for name, value in part._parameters.items()
                if value is not None
            ]
            for _, _, value in homes:
                if not hasattr(value, "_shardkit_held"):
                    # fully_shard knows no 0-dim tensors, and takes memory as it lies.
                    value.data = value.data.view(1) if value.dim() == 0 else value.data.contiguous()
            state: Any = None
            try:
                fully_shard(unit, **{**settings, "ignored_params": self._ignored(order)})
                state = _module_state_mapping[unit]()
            finally:
                self.restore.classes()
                replaced = {id(part._parameters[name]): value for part, name, value in homes}
                for part, name, value in homes:
                    # As it was replaced: recurrent layers keep a list of theirs.
                    unsafe_setattr_param(part, name, value)
            self._take(state, number, replaced, order)
        self._settle(root)
        self.restore.hooks()
        self.held.sort(key=lambda held: held.index)

    def _ignored(self, order: dict[nn.Parameter, int]) -> set[nn.Parameter]:
        return self._empty | {value for value in order if hasattr(value, "_shardkit_held")}

    def _take(self, state: Any, number: int, replaced: dict[int, Any], order: dict[nn.Parameter, int]) -> None:
        """Have fully_shard's records of a unit be our own."""
        state.__class__ = State
        state.shared = self.shared
        for group in state._fsdp_param_groups:
            group.__class__ = Group
            group.take(self.shared, state, number)
            self.groups.append(group)
            group.reduce_scatter_unused_params = False
            # One sum, divided after: what AVG is where there is one.
            group.force_sum_reduction_for_comms = True
            group.gradient_divide_factor = None
            group.reshard_after_backward = True
            if self._gloo:
                group._all_gather_comm, group._reduce_scatter_comm = Gather(), Scatter()
            for record in group.fsdp_params:
                value = replaced[id(record.sharded_param)]
                shape, stride = self._shapes[value]
                record.__class__ = Held
                record.take(value, shape, stride, order[value], group, self._low)
                self.held.append(record)

    def _settle(self, root: nn.Module) -> None:
        """Have fully_shard do at once what it would do in the first forward."""
        state: Any = _module_state_mapping[root]()
        self.shared.root = state
        state._lazy_init()
        for group in self.groups:
            for hooks in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                # They would shard what is gathered to be read or written.
                for handle in hooks.values():
                    handle.remove()
            for held in group.fsdp_params:
                held._post_load_hook_handle.remove()
            kinds = {held.local.dtype for held in group.fsdp_params if _is_number(held.local.dtype)}
            # Also where all are frozen: they may be thawed.
            group._orig_dtype = next(iter(kinds), None)
            # What the gradients have: float32, whatever they are gathered in.
            group._reduce_dtype = None if self._low is None else group._orig_dtype

    def exactly(self, exact: bool) -> None:
        """Have all parameters gathered in float32 from here on, or again as the option says."""
        if self._low is None or self.shared.exact == exact:
            return
        for group in self.groups:
            group.reshard_now()
        self.shared.exact = exact
        for held in self.held:
            held.exactly(exact)

    def whole(self, held: Held) -> Tensor:
        """Return a parameter whole, flat, with what pads the shards. Collective."""
        return whole(held._sharded_param_data)

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the module whole parameters, and take off what hangs on it. Collective."""
        self.shared.whole = False
        for group in self.groups:
            group.reshard_now()
        for held in self.held:
            held.sharded_param.grad = None
            held.let_go(self.whole(held).to(self._device))
        taken = {held.value for held in self.held}
        for value, (shape, stride) in self._shapes.items():
            if value not in taken and (value.shape != shape or value.stride() != stride):
                value.data = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(
                    value.data.view(shape)
                )
        self.detach()

    def detach(self) -> None:
        """Take off what hangs on the module, whatever is in its parameters."""
        self.restore.undo()
        if self.lockstep is not None:
            self.lockstep.close()
            self.lockstep = None


_ACTS = (("", ""), ("", " in backward"), ("the averaging of ", ""))


def _is_number(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def by_dtype(model: nn.Module, chosen: list[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return units of which each has parameters of one type, by making more where a unit has several.

    Raises:
        UnsupportedError: a module holds parameters of several types.
    """
    found: list[nn.Module] = []
    for unit in [*chosen, model]:
        others = {part for other in chosen if other is not unit for part in other.modules()} if unit is model else set()
        parts = [part for part in unit.modules() if part not in others]
        sizes: dict[torch.dtype, int] = {}
        for value in dict.fromkeys(v for part in parts for v in part._parameters.values() if v is not None):
            if value not in ignored and _is_number(value.dtype):
                sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
        main = max(sizes, key=lambda kind: sizes[kind], default=None)
        for part in parts if len(sizes) > 1 else ():
            if any(part in other.modules() for other in found):
                continue
            kinds = {v.dtype for v in part.parameters() if v not in ignored and _is_number(v.dtype)}
            if (
                main in kinds
                and len(kinds) > 1
                and any(
                    v is not None and v.dtype is not main and _is_number(v.dtype) for v in part._parameters.values()
                )
            ):
                raise UnsupportedError(
                    f"backend 'fsdp' gathers parameters of one type together, and a {type(part).__name__} holds some "
                    f"of {' and '.join(sorted(map(str, kinds)))}: give each type a module of its own, or use ddp"
                )
            if kinds and main not in kinds:
                if len(kinds) > 1 or part is model or not has_forward(part):
                    raise UnsupportedError(
                        f"backend 'fsdp' gathers parameters of one type together, and those of a "
                        f"{type(part).__name__} are of {' and '.join(sorted(map(str, kinds)))}: use ddp"
                    )
                found.append(part)
        if unit is not model:
            found.append(unit)
    return found
