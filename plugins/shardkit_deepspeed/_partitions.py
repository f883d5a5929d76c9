"""Stages 1 and 2: every rank holds the weights, and steps with its part of each group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from shardkit import Shard, Update
from shardkit.errors import UnsupportedError
from shardkit_deepspeed._fragments import Fragment
from shardkit_deepspeed._half import write
from shardkit_deepspeed._library import gather_weights, offsets_in, set_boundary
from shardkit_deepspeed._restore import Restore
from shardkit_deepspeed._sharded import ShardedEngine

if TYPE_CHECKING:
    from torch import Tensor, nn


@final
class PartitionEngine(ShardedEngine):
    """Over DeepSpeed's optimizer for stages 1 and 2.

    At stage 1 gradients are averaged once a window, at stage 2 in each backward, where each rank keeps its part.

    DeepSpeed copies that part into one tensor, and again for the step. Where masters and weights are the same memory,
    each fragment's gradient is kept by itself here, and the step is made from those.
    """

    _may_alias = True
    """Whether masters are the weights' own memory where they can be. False drives all of DeepSpeed's own path."""

    def __init__(self, *args: Any, restore: Restore) -> None:
        super().__init__(*args)
        self._restore = restore
        self.stage = 2 if self._zero.partition_gradients else 1
        self.lockstep = "backward" if self.stage == 2 else "window"
        self._zero.scaled_global_norm = lambda norm_type=2: self._norm_tensor()
        if self.stage == 2:
            self._handles += [
                value.register_post_accumulate_grad_hook(self._hook(index)) for index, value in enumerate(self._params)
            ]
        self._kept: dict[int, list[Tensor]] = {}
        if self._aliased:
            self._keep_fragments()
        elif self._half is not None:
            self._average_in_float32()
        else:
            self._handles.append(self.model.register_load_state_dict_post_hook(self._refresh))

    def _find_parameters(self) -> None:
        for group, values in enumerate(self._zero.bit16_groups):
            self._params += values
            self._homes += [group] * len(values)

    def _attach(self) -> None:
        zero = self._zero
        places = self._places = {id(value): index for index, value in enumerate(self._params)}
        self._aliased = True
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            part = zero.parallel_partitioned_bit16_groups[group][self._rank]
            if self._may_alias and part.dtype == master.dtype and part.device == master.device:
                # In fp32 DeepSpeed's master is a second copy of the same numbers, which overwrites what the user loads
                # or writes into the weights. One copy serves both.
                master.data = part.data
                if zero.cpu_offload:
                    zero.param_buffer_of_bit16_for_cpu_offload_groups[group] = part
            else:
                self._aliased = False
            first, size = self._rank * part.numel(), part.numel()
            fragments = []
            values, offsets = zero.round_robin_bit16_groups[group], offsets_in(zero, group)
            for value, offset in zip(values, offsets, strict=True):
                start, end = max(offset, first), min(offset + value.numel(), first + size)
                if start < end:
                    fragments.append(Fragment(places[id(value)], start - offset, start - first, end - start))
            self._fragments.attach(master, self._fragments.homes[group], fragments)
        # DeepSpeed's own views of the master would keep the second copy alive.
        zero._link_all_hp_params()

    def _keep_fragments(self) -> None:
        """Have averaged gradients kept here, and what DeepSpeed has for them given back."""
        zero = self._zero
        zero.copy_grads_in_partition = self._keep
        # What is averaged and isn't this rank's goes at once, as at stage 2.
        zero.partition_gradients = True
        for master in zero.single_partition_of_fp32_groups:
            master.grad = None
        if zero.cpu_offload:
            zero.offload_gradient_dict.clear()
            zero.temp_grad_buffer_for_cpu_offload = zero.temp_grad_buffer_for_gpu_offload = None

    @torch.no_grad()
    def _keep(self, value: nn.Parameter, group: int | None = None) -> None:
        """Keep this rank's part of a gradient that has been averaged, in a bucket or in its own memory."""
        index, gradient = self._places[id(value)], value.grad
        assert gradient is not None
        value.grad = None
        alone = gradient.untyped_storage().nbytes() == gradient.nbytes
        flat, kept = gradient.view(-1), self._kept.get(index)
        pieces = [flat.narrow(0, part.start, part.size) for part, _ in self._fragments.of(index)]
        if kept is None:
            # A view of memory that the next bucket takes, or that holds more than is kept.
            self._kept[index] = [
                piece if alone and piece.numel() == flat.numel() else piece.clone() for piece in pieces
            ]
        else:
            for own, piece in zip(kept, pieces, strict=True):
                own.add_(piece)

    def _low_precision(self, master: Tensor) -> Tensor:
        zero = self._zero
        group = next(at for at, held in enumerate(zero.single_partition_of_fp32_groups) if held is master)
        part: Tensor = zero.parallel_partitioned_bit16_groups[group][self._rank]
        return part

    def _average_in_float32(self) -> None:
        """Have DeepSpeed divide gradients in float32 at stage 2 as at stage 1, before it adds up those of all ranks."""
        zero = self._zero
        zero.use_grad_accum_attribute = True
        for value in self._params:
            value.grad_accum = None  # type: ignore[attr-defined]
        assert self._half is not None
        self._half.on_load = self._load_master

    def _load_master(self, value: nn.Parameter, given: Tensor) -> None:
        index = self._places.get(id(value))
        if index is not None:
            write(self._fragments, index, given)

    def _refresh(self, *_: Any) -> None:
        self._zero.refresh_fp32_params()

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        zero = self._zero
        if self.stage == 1:
            loss.backward(gradient)
            if self._half is not None:
                self._add_up()
            if last:
                set_boundary(zero, last=True)
                zero.setup_buckets()
                self._average_all()
        else:
            set_boundary(zero, last=last)
            zero.setup_buckets()
            self._running = True
            try:
                loss.backward(gradient)
            finally:
                self._running = False
            self._order.finish(self._release, self._zeros)
            self._end_averaging()
        self._refuse_thawed()
        if last:
            self._unscale()

    def _average_all(self) -> None:
        for index, value in enumerate(self._params):
            if value.grad is not None or getattr(value, "grad_accum", None) is not None:
                self._seen[index] = 1
                if value.grad is not None and value.grad.is_sparse:
                    value.grad = value.grad.to_dense()
            else:
                self._zeros(index)
            self._release(index)
        self._end_averaging()

    def _add_up(self) -> None:
        for value in self._params:
            if value.grad is not None:
                if value.grad.is_sparse:
                    value.grad = value.grad.to_dense()
                self._zero._fill_param_grad_accum_attribute(value)

    def _end_averaging(self) -> None:
        if self._aliased:
            self._end_bucket()
            return
        self._zero.overlapping_partition_gradients_reduce_epilogue()
        if self._half is not None:
            # Their sums are in DeepSpeed's partition now; what stays here would count again.
            for value in self._params:
                value.grad_accum = None  # type: ignore[attr-defined]

    def _end_bucket(self) -> None:
        """Average what is left in the buckets, and wait for it."""
        zero = self._zero
        zero.reduce_ipg_grads()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        if zero.overlap_comm:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            zero._clear_previous_reduced_grads()
        zero._release_ipg_buffers()
        for index, value in enumerate(self._params):
            # They stay where they are without contiguous_gradients.
            if value.grad is not None and self._fragments.of(index):
                self._keep(value)
            value.grad = None

    def _release(self, index: int) -> None:
        zero, value = self._zero, self._params[index]
        if self._half is not None:
            zero._fill_param_grad_accum_attribute(value)
        zero.reduce_ready_partitions_and_remove_grads(value, self._homes[index])

    def _arrived_again(self, index: int, name: str) -> None:
        raise UnsupportedError(
            f"backend 'deepspeed' at stage 2 averages a gradient as soon as it comes, and that of {name!r} came twice "
            "in one backward: re-entrant checkpointing of parts that share it. Checkpoint with use_reentrant=False, or "
            "use deepspeed:stage=1 or ddp"
        )

    def _local_gradients(self) -> list[Tensor]:
        """Return this rank's averaged gradients: the pieces of each group's flat partition, in order."""
        zero = self._zero
        if self._aliased:
            return [piece for master in zero.single_partition_of_fp32_groups for piece in self._kept_of(master)]
        if zero.cpu_offload:
            return [master.grad for master in zero.single_partition_of_fp32_groups]
        return [piece for group in range(len(zero.bit16_groups)) for piece in zero.averaged_gradients[group]]

    def _gradient_pieces(self) -> list[tuple[Fragment, Tensor]]:
        zero = self._zero
        found: list[tuple[Fragment, Tensor]] = []
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            if self._aliased:
                found += zip(self._fragments.within(master), self._kept_of(master), strict=True)
                continue
            if zero.cpu_offload:
                flat = master.grad
            else:
                flat = torch.cat([piece.reshape(-1) for piece in zero.averaged_gradients[group]])
            for fragment in self._fragments.within(master):
                found.append((fragment, flat.narrow(0, fragment.offset, fragment.size)))
        return found

    def _kept_of(self, master: Tensor) -> list[Tensor]:
        """Return the gradients of the fragments within a master, in order."""
        # A parameter has no more than one fragment on a rank.
        return [self._kept[fragment.at][0] for fragment in self._fragments.within(master)]

    def _apply(self, finite: bool) -> bool:
        if not self._aliased:
            return super()._apply(finite)
        zero = self._zero
        if finite:
            for master in zero.single_partition_of_fp32_groups:
                pieces = self._kept_of(master)
                self._clip(pieces)
                self._fragments.update(master, pieces)
        self._drop_gradients()
        if finite:
            gather_weights(zero)
            for group in range(len(zero.bit16_groups)):
                zero._update_model_bit16_weights(group)
        return finite

    def step(self) -> Update:
        update = super().step()
        if not update.applied and self._half is not None:
            # With offload DeepSpeed forgets to, and would leave out every later step as well.
            self._drop_gradients()
        return update

    def _drop_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad()
        self._kept.clear()
        for value in self.model.parameters():
            value.grad = None
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in held:
                held[group] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        zero._release_ipg_buffers()
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero.micro_step_id = -1

    def full_weights(self) -> dict[str, Tensor]:
        if self._half is None:
            return super().full_weights()
        self._take_all_over()
        whole: dict[int, Tensor] = {}
        weights = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in whole:
                index = self._places.get(id(value))
                if index is None:
                    whole[id(value)] = value.detach().to("cpu", self._half.kind(value), copy=True)
                else:
                    whole[id(value)] = self._whole_master(index).cpu()
            weights[name] = whole[id(value)]
        return weights

    def weight_shards(self) -> list[Shard]:
        if self._half is None:
            return super().weight_shards()
        others = [
            Shard(name, 0, value.detach(), rounded=True)
            for name, value in self.model.named_parameters()
            if id(value) not in self._places
        ]
        return [*self._master_shards(), *others]

    @torch.no_grad()
    def loaded(self) -> None:
        zero = self._zero
        if self._half is None:
            if not self._aliased:
                zero.refresh_fp32_params()
            return
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            parts = zero.parallel_partitioned_bit16_groups[group]
            parts[self._rank].copy_(master)
            for rank, part in enumerate(parts if self._world_size > 1 else ()):
                dist.broadcast(part, rank)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._drop_gradients()
        half = self._half
        if half is not None:
            half.detach()
            self._take_all_over()
            half.restore_types(self._params)
        self._library.destroy()
        for index, value in enumerate(self._params):
            # Out of DeepSpeed's flat tensors, which can then go.
            value.data = value.data.clone() if half is None else self._whole_master(index)
        self._restore.undo()
