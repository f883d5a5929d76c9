"""Stage 3: every rank holds a shard of each parameter; modules gather theirs while they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from shardkit import Shard
from shardkit.errors import StateError, UnsupportedError
from shardkit.lockstep import broken
from shardkit_deepspeed._fragments import Fragment
from shardkit_deepspeed._half import ignore, write
from shardkit_deepspeed._hooks import gather_in_every_backward, patch_outputs, unpatch_outputs
from shardkit_deepspeed._library import GRADIENTS, patch_order_check, restore_linear, set_boundary, unpatch_order_check
from shardkit_deepspeed._lockstep import Lockstep
from shardkit_deepspeed._meeting import Meeting
from shardkit_deepspeed._restore import Restore
from shardkit_deepspeed._sharded import ShardedEngine, _elements, _shape

if TYPE_CHECKING:
    from torch import Tensor, nn

_open = 0
# What DeepSpeed does as modules run, other than to fetch.
_GATHERING = ("release_sub_module", "trace_prologue", "record_module", "reset_step")


@final
class Stage3Engine(ShardedEngine):
    """Over DeepSpeed's optimizer for stage 3, which hooks into the user's own module.

    DeepSpeed holds gradients in one tensor for ever, and copies them for the step. Where masters and weights are the
    same memory, each parameter's part comes with its gradient here and goes with the step, which is made from those.
    """

    stage = 3
    lockstep = "forward"
    _may_alias = True
    """Whether masters are the weights' own memory where they can be. False drives all of DeepSpeed's own path."""

    def __init__(self, *args: Any, deepspeed: Any, restore: Restore, scalars: list[nn.Parameter]) -> None:
        global _open
        super().__init__(*args)
        if not _open:
            patch_order_check()
            patch_outputs()
        _open += 1
        self._restore = restore
        self._gather = deepspeed.zero.GatheredParameters
        self._micro = 0
        self._again: set[int] = set()
        for value in scalars:
            # DeepSpeed can't send a 0-dim tensor, and was given one of one element in its place.
            value.ds_shape = torch.Size([])  # type: ignore[attr-defined]
        self._zero._get_norm_groups = lambda: [self._norm_tensor()]
        self._handles += [
            value.register_post_accumulate_grad_hook(self._hook(index)) for index, value in enumerate(self._params)
        ]
        self._whole = False
        self._reading = False
        self._fetch = self._coordinator.fetch_sub_module
        self._lockstep = Lockstep(self.model) if self._world_size > 1 else None
        self._coordinator.fetch_sub_module = self._fetch_in_lockstep
        gather_in_every_backward(self._zero.parameter_offload, self.model)
        self._wrapped: list[tuple[nn.Module, str]] = []
        # Ranks end at different lengths, and a module that gathers as it runs would wait for the others for ever.
        self._wrap(self.model, "generate", self.gathered)
        # A sharded parameter has no place for a whole one.
        self._writing = False
        self._meeting = Meeting()
        for part in self.model.modules():
            self._wrap(part, "load_state_dict", self._writable)
        self._versions = self._written()
        # ``state_dict``, and what calls it, would write down tensors without elements.
        self._handles += [part.register_state_dict_pre_hook(self._refuse_empty) for part in self.model.modules()]

    @property
    def _coordinator(self) -> Any:
        return self._zero.parameter_offload.get_param_coordinator()

    def _fetch_in_lockstep(self, part: nn.Module, forward: bool) -> None:
        if self._whole:
            return
        if self._lockstep is not None:
            self._lockstep.enter(part, forward)
        self._fetch(part, forward)

    def _find_parameters(self) -> None:
        for group, values in enumerate(self._zero.fp16_groups):
            self._params += values
            self._homes += [group] * len(values)

    def _attach(self) -> None:
        zero = self._zero
        index = 0
        self._aliased = True
        for group, master in enumerate(zero.fp32_partitioned_groups_flat):
            part = zero.fp16_partitioned_groups_flat[group]
            if self._may_alias and part.dtype == master.dtype and part.device == master.device:
                master.data = part.data
            else:
                self._aliased = False
            fragments, offset = [], 0
            for value in zero.fp16_groups[group]:
                size = value.partition_numel()
                start = self._rank * size
                count = min(size, _elements(value) - start)
                if count > 0:
                    fragments.append(Fragment(index, start, offset, count))
                offset += size
                index += 1
            self._fragments.attach(master, self._fragments.homes[zero.sub_group_to_group_id[group]], fragments)
        # In host memory, of weights on a GPU, they are DeepSpeed's own, of locked pages.
        self._comes_and_goes = self._aliased and self._fragments.flats()[0].device == self._device
        if self._comes_and_goes:
            self._keep_parts()

    def _keep_parts(self) -> None:
        """Have gradients held only while there are any, and what DeepSpeed has for them given back."""
        zero = self._zero
        parts = Parts({value.ds_id: value.ds_tensor for group in zero.fp16_groups for value in group})
        setattr(zero, GRADIENTS, parts)
        zero.grad_partitions_flat_buffer = None
        for master in zero.fp32_partitioned_groups_flat:
            master.grad = None
        # It copies them to where they are, and takes their norm.
        zero._offload_grad_partition_at_boundary = _nothing

    def _low_precision(self, master: Tensor) -> Tensor:
        zero = self._zero
        group = next(at for at, held in enumerate(zero.fp32_partitioned_groups_flat) if held is master)
        part: Tensor = zero.fp16_partitioned_groups_flat[group]
        return part

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        zero = self._zero
        set_boundary(zero, last=last)
        # The first pass of a window overwrites what the shards of the gradients hold, the others add.
        zero.micro_step_id = self._micro
        self._running = True
        try:
            loss.backward(gradient)
        except RuntimeError as error:
            error.add_note(
                "backend 'deepspeed' at stage 3 shards a parameter while its module doesn't run: a loss computed from "
                "parameters outside of their module needs deepspeed:stage=2 or ddp"
            )
            raise
        finally:
            self._running = False
        if self._lockstep is not None:
            self._lockstep.end()
        self._order.finish(self._release, self._zeros)
        zero.overlapping_partition_gradients_reduce_epilogue()
        zero.backward_epilogue()
        self._micro = 0 if last else self._micro + 1
        self._refuse_thawed()
        if last:
            self._refuse_written()
        for value in self._others:
            value.grad = None
        if last:
            self._unscale()

    def _written(self) -> list[int]:
        """Return how often each parameter was written to; what DeepSpeed does with it doesn't count."""
        return [value._version for value in self.model.parameters()]

    def _refuse_written(self) -> None:
        versions = self._written()
        if versions != self._versions:
            pairs = zip(self.model.named_parameters(), versions, self._versions, strict=True)
            name = next(name for (name, _), now, before in pairs if now != before)
            self._versions = versions
            raise UnsupportedError(
                f"backend 'deepspeed' at stage 3 shards {name!r}, so that what was written into it since the last step "
                "is lost: bring new weights with load_state_dict on every rank, or use deepspeed:stage=2 or ddp"
            )

    def _release(self, index: int) -> None:
        value: Any = self._params[index]
        if value.grad.numel() != value.ds_numel:
            name = self._names[id(value)]
            value.grad = None
            raise UnsupportedError(
                f"backend 'deepspeed' at stage 3 shards {name!r} while its module doesn't run, so that it is empty "
                "there, and the loss was computed from it outside of its module's forward: compute this within the "
                "module, or use deepspeed:stage=2 or ddp"
            )
        self._zero.reduce_independent_p_g_buckets_and_remove_grads(self._params[index])

    def _zeros(self, index: int) -> None:
        value = self._params[index]
        # torch wants a gradient of the size that the parameter has at this moment, DeepSpeed one of its whole size.
        value.grad = torch.zeros_like(value)
        if value.grad.shape != _shape(value):
            value.grad.data = torch.zeros(_shape(value), dtype=value.dtype, device=value.device)

    def _arrived_again(self, index: int, name: str) -> None:
        self._again.add(index)

    def _local_gradients(self) -> list[Tensor]:
        zero = self._zero
        if self._comes_and_goes:
            return [piece for master in zero.fp32_partitioned_groups_flat for piece in self._pieces_of(master)]
        if zero.offload_optimizer:
            return [master.grad for master in zero.fp32_partitioned_groups_flat]
        return [zero.grad_partitions_flat_buffer]

    def _gradient_pieces(self) -> list[tuple[Fragment, Tensor]]:
        zero = self._zero
        found: list[tuple[Fragment, Tensor]] = []
        at = 0
        for master in zero.fp32_partitioned_groups_flat:
            if self._comes_and_goes:
                found += zip(self._fragments.within(master), self._pieces_of(master), strict=True)
                continue
            size = master.numel()
            flat = master.grad if zero.offload_optimizer else zero.grad_partitions_flat_buffer.narrow(0, at, size)
            at += size
            for fragment in self._fragments.within(master):
                found.append((fragment, flat.narrow(0, fragment.offset, fragment.size)))
        return found

    def _pieces_of(self, master: Tensor) -> list[Tensor]:
        """Return the gradients of the fragments within a master, in order."""
        parts = getattr(self._zero, GRADIENTS)
        fragments = self._fragments.within(master)
        return [parts[self._params[part.at].ds_id].narrow(0, 0, part.size) for part in fragments]  # type: ignore[attr-defined]

    def _apply(self, finite: bool) -> bool:
        if not self._comes_and_goes:
            return super()._apply(finite)
        zero = self._zero
        zero._pre_step()
        zero._partition_all_parameters()
        if finite:
            for master in zero.fp32_partitioned_groups_flat:
                pieces = self._pieces_of(master)
                self._clip(pieces)
                self._fragments.update(master, pieces)
        self._drop_gradients()
        if finite:
            # Gathers what stays whole.
            zero._post_step(set())
        return finite

    def _drop_gradients(self) -> None:
        zero = self._zero
        if self._comes_and_goes:
            getattr(zero, GRADIENTS).clear()
        for value in self.model.parameters():
            value.grad = None
        zero.zero_grad()
        zero.averaged_gradients = {}
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        self._again.clear()
        self._micro = 0

    # What is whole.

    def full_weights(self) -> dict[str, Tensor]:
        if self._half is not None:
            self._take_all_over()
        elif self._whole:
            return super().full_weights()
        places = {} if self._half is None else {id(value): index for index, value in enumerate(self._params)}
        whole: dict[int, Tensor] = {}
        weights = {}
        self._reading = True
        try:
            held = self.model.state_dict(keep_vars=True)
        finally:
            self._reading = False
        for name, value in held.items():
            if id(value) in places and id(value) not in whole:
                whole[id(value)] = self._whole_master(places[id(value)]).cpu()
            elif id(value) not in whole:
                # One parameter at a time: the extra memory is the copy that was asked for.
                with self._gathered([value]):
                    kind = value.dtype if self._half is None else self._half.kind(value)
                    whole[id(value)] = value.detach().to("cpu", kind, copy=True)
            weights[name] = whole[id(value)]
        return weights

    def _refuse_empty(self, part: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._whole and not self._reading:
            raise UnsupportedError(
                "backend 'deepspeed' at stage 3 shards the parameters, and state_dict would find them empty: take "
                "session.full_weights(), or call it within session.evaluate(), on every rank"
            )

    @contextmanager
    def _gathered(self, values: list[Any]) -> Iterator[None]:
        sharded = [value for value in values if hasattr(value, "ds_status")]
        if not sharded:
            yield
            return
        with self._gather(sharded):
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        coordinator = self._coordinator
        if self._whole:
            # Within another such context.
            yield
            return
        self._zero.parameter_offload.partition_all_parameters()
        with self._gathered(list(self.model.parameters())):
            self._whole = True
            for name in _GATHERING:
                setattr(coordinator, name, _nothing)
            try:
                yield
            finally:
                self._whole = False
                for name in _GATHERING:
                    delattr(coordinator, name)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        if self._writing:
            # A module whose own method loads its parts.
            yield
            return
        self._meeting.meet("load_state_dict")
        self._writing = True
        loaded: dict[int, Tensor] = {}
        if self._half is not None:
            self._half.on_load = lambda value, given: loaded.__setitem__(id(value), given)
        try:
            # Rank 0's values are those that stay.
            with self._gather(list(self.model.parameters()), modifier_rank=0):
                yield
        finally:
            self._writing = False
            self._versions = self._written()
            if self._half is not None:
                self._half.on_load = ignore
        if self._half is not None:
            self._load_masters(loaded)
        elif not self._aliased:
            self._zero.refresh_fp32_params()

    def _load_masters(self, loaded: dict[int, Tensor]) -> None:
        """Write the values that rank 0 loaded into the masters, as they were before they were rounded. Collective."""
        has = torch.tensor([id(value) in loaded for value in self._params], dtype=torch.uint8, device=self._device)
        if self._world_size > 1:
            dist.broadcast(has, 0)
        for index, value in enumerate(self._params):
            if not has[index]:
                continue
            if self._rank == 0:
                whole = loaded[id(value)].detach().to(self._device, torch.float32, copy=True).contiguous()
            else:
                whole = torch.empty(_shape(value), dtype=torch.float32, device=self._device)
            if self._world_size > 1:
                dist.broadcast(whole, 0)
            write(self._fragments, index, whole)

    def _wrap(self, part: nn.Module, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Have a method of the user's module, or of a part of it, run with whole weights."""
        plain = getattr(part, name, None)
        if not callable(plain):
            return

        @functools.wraps(plain)
        def whole(*args: Any, **kwargs: Any) -> Any:
            with context():
                return plain(*args, **kwargs)

        part.__dict__[name] = whole
        self._wrapped.append((part, name))

    # State.

    def weight_shards(self) -> list[Shard]:
        trained = {id(value) for value in self._params}
        others = []
        value: Any
        for name, value in self.model.named_parameters():
            if id(value) in trained:
                continue
            size = value.partition_numel() if hasattr(value, "ds_tensor") else _elements(value)
            start = self._rank * size if hasattr(value, "ds_tensor") else 0
            count = min(size, _elements(value) - start)
            if count > 0:
                part = getattr(value, "ds_tensor", value).detach().view(-1).narrow(0, 0, count)
                others.append(Shard(name, start, part, rounded=self._half is not None))
        return [*self._master_shards(), *others]

    def restart(self) -> None:
        super().restart()
        if self._lockstep is not None:
            self._lockstep.restart()
        self._zero.parameter_offload.partition_all_parameters()

    @torch.no_grad()
    def loaded(self) -> None:
        zero = self._zero
        if not self._aliased:
            for held, master in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
                held.copy_(master)

    def close(self) -> None:
        global _open
        parted = self._world_size > 1 and broken()
        for handle in self._handles:
            handle.remove()
        if self._lockstep is not None:
            self._lockstep.close()
        if not parted:
            self._drop_gradients()
        if self._half is not None:
            self._half.detach()
            if not parted:
                self._take_all_over()
        for part, name in self._wrapped:
            del part.__dict__[name]
        self._library.module_forward_pre_hook.remove()
        self._library.module_forward_post_hook.remove()
        if not parted:
            self._give_back()
            self._library.destroy()
        _forget(self.model)
        self._restore.undo()
        _open -= 1
        if not _open:
            restore_linear()
            unpatch_order_check()
            unpatch_outputs()
        if parted:
            raise StateError(
                "backend 'deepspeed' at stage 3 can't give the weights back, since the ranks parted in the midst of a "
                "collective: go on from a checkpoint in new processes"
            )

    def _give_back(self) -> None:
        self._zero.parameter_offload.partition_all_parameters()
        values: list[Any] = list(self.model.parameters())
        places = {id(value): index for index, value in enumerate(self._params)}
        for value in values:
            if self._half is not None and id(value) in places:
                whole = self._whole_master(places[id(value)])
            else:
                value.all_gather()
                whole = value.data.view(_shape(value)).clone()
                value.partition()
                whole = whole if self._half is None else whole.to(self._half.kind(value))
            value.ds_tensor = None
            value.data = whole


class Parts(dict[int, "Tensor"]):
    """The parts of the gradients that this rank keeps: each is there, and zero, from when it is first asked for."""

    def __init__(self, like: dict[int, Tensor]) -> None:
        self._like = like

    def __missing__(self, number: int) -> Tensor:
        held = self._like[number]
        part = self[number] = torch.zeros(held.numel(), dtype=held.dtype, device=held.device)
        return part


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what gathers and shards while the module is whole."""


def _forget(model: nn.Module) -> None:
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [part for part in stack if part is not model]
