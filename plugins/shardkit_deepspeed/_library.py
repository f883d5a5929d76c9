"""DeepSpeed itself: imported quietly, over the process group that exists, with nothing compiled."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError
from shardkit.lockstep import reduce_scatter, watched

if TYPE_CHECKING:
    from torch import nn

GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Where stage 3 has the parts of the gradients that a rank keeps, by the number of the parameter."""

_seen_group: weakref.ref[Any] | None = None

# What the engines drive beyond DeepSpeed's public calls, seen in 0.19.8. Checked at prepare, so that a version that
# moved one of them is refused and not driven blindly.
_DRIVEN = {
    1: (
        "overlapping_partition_gradients_reduce_epilogue",
        "reduce_ready_partitions_and_remove_grads",
        "reduce_ipg_grads",
        "setup_buckets",
        "copy_grads_in_partition",
        "scaled_global_norm",
        "refresh_fp32_params",
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
        "_grad_acc_hooks",
    ),
    3: (
        "backward_epilogue",
        "overlapping_partition_gradients_reduce_epilogue",
        "reduce_independent_p_g_buckets_and_remove_grads",
        "_get_norm_groups",
        "_pre_step",
        "_post_step",
        "_partition_all_parameters",
        "_offload_grad_partition_at_boundary",
        GRADIENTS,
        "grad_partitions_flat_buffer",
        "fp32_partitioned_groups_flat",
        "fp16_partitioned_groups_flat",
        "fp16_groups",
        "parameter_offload",
        "_grad_acc_hooks",
    ),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what DeepSpeed and torch say of each other, and the user can't act on, out of the user's log."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextmanager
def environment(device: torch.device) -> Iterator[None]:
    """Give DeepSpeed the variables of a launcher while it looks, and take them back."""
    place = str(torch.cuda.current_device()) if device.type == "cuda" else os.environ.get("LOCAL_RANK", "0")
    wanted = {"LOCAL_RANK": place, "DS_ACCELERATOR": device.type}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load(device: torch.device) -> Any:
    """Import DeepSpeed for this device and put it on the default process group. Collective."""
    with quiet(), environment(device):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.accelerator.real_accelerator import set_accelerator

        # Errors reach the user as exceptions; what is below them is DeepSpeed's diary.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if get_accelerator().device_name() != device.type:
            set_accelerator(accelerator_for(device))
        if device.type == "cpu":
            from deepspeed.utils import nvtx

            # Marks for a GPU's profiler, around thousands of calls a step.
            nvtx.enable_nvtx = False
        _import_muon()
        _join(deepspeed)
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon without what its decorators load for torch's compiler: 30 MiB and a second.

    ZeRO asks for its class in every run. Its functions are compiled when they are first called.
    """
    name = "deepspeed.runtime.zero.muon.original_muon"
    if name in sys.modules:
        return
    from deepspeed.runtime import compiler

    compiles = compiler.compile

    def later(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            @functools.cache
            def compiled() -> Any:
                return compiles(*args, **kwargs)(function)

            @functools.wraps(function)
            def call(*given: Any, **named: Any) -> Any:
                return compiled()(*given, **named)

            return call

        return decorate

    compiler.compile = later
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        # Another version, which has it elsewhere or not at all.
        pass
    finally:
        compiler.compile = compiles


def accelerator_for(device: torch.device) -> Any:
    """Return DeepSpeed's accelerator for a device."""
    if device.type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        return CUDA_Accelerator()
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return CPU_Accelerator()


def follow_group() -> None:
    """Have DeepSpeed forget the process group that it knew, if that is gone, and the subgroups that it made of it."""
    global _seen_group
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    current = dist.distributed_c10d._get_default_group()
    if _seen_group is not None and _seen_group() is not current:
        comm.cdb = None
        groups._release_process_group_references()
    _seen_group = weakref.ref(current)


def _join(deepspeed: Any) -> None:
    import deepspeed.comm.comm as comm

    follow_group()
    if comm.cdb is None:
        with without_compiler(deepspeed.ops):
            comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
    # DeepSpeed calls both by names that torch warns about at each call.
    for old, new in (
        ("all_gather_function", "all_gather_single"),
        ("reduce_scatter_function", "reduce_scatter_single"),
    ):
        setattr(comm.cdb, old, getattr(dist, new, None) or getattr(comm.cdb, f"get_{old}")())
    if dist.get_backend() == "gloo":
        # Elsewhere to wait for a collective is no more than to order it before what follows.
        comm.cdb.all_gather_function = watched(comm.cdb.all_gather_function)
        comm.cdb.reduce_scatter_function = reduce_scatter
        _gather_in_buckets()


def _gather_in_buckets() -> None:
    """Have stages 1 and 2 gather updated weights a bucket at a time: gloo receives into memory of its own."""
    from deepspeed.runtime.zero import stage_1_and_2

    plain = stage_1_and_2.all_gather_dp_groups
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def gather(
        groups_flat: Any, partitioned_param_groups: Any, dp_process_group: Any, *rest: Any, **named: Any
    ) -> None:
        size = named.get("allgather_bucket_size")
        if size is None or dist.get_backend() != "gloo":
            plain(groups_flat, partitioned_param_groups, dp_process_group, *rest, **named)
            return
        for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True):
            if len(parts) == 1:
                continue
            rank = dist.get_rank(group)
            length = max(size // len(parts), 1)
            for pieces in zip(*(part.detach().split(length) for part in parts), strict=True):
                dist.all_gather(list(pieces), pieces[rank], group)

    stage_1_and_2.all_gather_dp_groups = gather


def gather_weights(zero: Any) -> None:
    """Bring the parts of the weights that each rank updated to all, at stages 1 and 2. Collective."""
    from deepspeed.runtime.zero import stage_1_and_2

    stage_1_and_2.all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )


@contextmanager
def without_compiler(ops: Any) -> Iterator[None]:
    """Keep DeepSpeed from compiling its shared-memory collectives when it joins the process group.

    It would wait silently and for ever on the lock of a compiler that was killed, and fail without ninja. Torch's own
    collectives do the work. Only to ask which ops could be compiled, DeepSpeed runs the compiler as well.
    """
    known = vars(ops).get("__compatible_ops__")
    vars(ops)["__compatible_ops__"] = {**(known or {}), "deepspeed_shm_comm": False}
    try:
        yield
    finally:
        if known is None:
            del vars(ops)["__compatible_ops__"]
        else:
            vars(ops)["__compatible_ops__"] = known


def build_engine(deepspeed: Any, model: nn.Module, optimizer: Any, config: dict[str, Any], device: torch.device) -> Any:
    """Return DeepSpeed's engine over the module. Collective."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    class PreparedEngine(DeepSpeedEngine):  # type: ignore[misc]
        """DeepSpeed's engine over a module whose replicas are equal already."""

        def _broadcast_model(self) -> None:
            # Done by the session; DeepSpeed's own fails on a 0-dim parameter.
            pass

        def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
            # For bf16 weights at stage 1 DeepSpeed takes another optimizer, which trusts that the backward passes of
            # all ranks are alike; that of stage 2 does stage 1 as well, with gradients in float32.
            kind = super()._do_optimizer_sanity_check(basic_optimizer)
            return ZERO_OPTIMIZATION if self.zero_optimization() else kind

    with quiet(), environment(device):
        partition_parameters.shutdown_init_context()
        try:
            return PreparedEngine(
                args=None,
                model=model,
                optimizer=optimizer,
                config=config,
                config_class=DeepSpeedConfig(config),
                dist_init_required=False,
                dont_change_device=True,
            )
        finally:
            partition_parameters.restore_init_context()


def check_driven(zero: Any, stage: int, version: str) -> None:
    """Raise if this version of DeepSpeed lacks what the engine drives.

    Raises:
        UnsupportedError: names what is missing.
    """
    missing = [name for name in _DRIVEN[3 if stage == 3 else 1] if not hasattr(zero, name)]
    if missing:
        raise UnsupportedError(
            f"backend 'deepspeed' doesn't know DeepSpeed {version}: its optimizer for stage {stage} has no "
            f"{', '.join(missing)}; it is tested with DeepSpeed 0.19.8; "
            "install that, or use ddp"
        )


def set_boundary(zero: Any, *, last: bool) -> None:
    """Tell DeepSpeed's optimizer whether the window's last backward comes next."""
    if hasattr(zero, "set_gradient_accumulation_boundary"):
        zero.set_gradient_accumulation_boundary(last)
    else:  # before 0.19.5
        zero.is_gradient_accumulation_boundary = last


def offsets_in(zero: Any, group: int) -> list[int]:
    """Return where in the flat tensor of a group each of its parameters begins, at stages 1 and 2."""
    if hasattr(zero, "round_robin_bit16_offsets"):
        known: list[int] = zero.round_robin_bit16_offsets[group]
        return known
    # Before 0.19.7 they follow each other without gaps.
    ends = itertools.accumulate(value.numel() for value in zero.round_robin_bit16_groups[group])
    return [0, *ends][:-1]


def restore_linear() -> None:
    """Give ``torch.nn.functional.linear`` back, which stage 3 replaces and leaves replaced."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    original = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if original is not None and torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = original


def patch_order_check() -> None:
    """Drop DeepSpeed's check that ranks ran the same modules: it is a collective that a rank may not come to.

    It also needs a launcher's variables for ever. What it finds out, :class:`Lockstep` has found out before.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    global _order_check
    _order_check = coordinator.assert_ints_same_as_other_ranks
    coordinator.assert_ints_same_as_other_ranks = _believe


def unpatch_order_check() -> None:
    """Give DeepSpeed its own check back."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = _order_check


_order_check: Any = None


def _believe(ids: list[int]) -> None:
    """Stand in for the check."""
