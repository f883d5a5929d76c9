"""From a model and an optimizer to an engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit import Engine, Strategy
from shardkit.errors import InputError, UnsupportedError
from shardkit.optimizers import reach, twin
from shardkit.parameters import sharing
from shardkit_deepspeed._config_optimizer import check_section, from_section
from shardkit_deepspeed._fragments import Fragment, Fragments, carried_state
from shardkit_deepspeed._half import Half, check_half
from shardkit_deepspeed._library import build_engine, check_driven, load
from shardkit_deepspeed._plan import Plan, make_plan
from shardkit_deepspeed._restore import Restore

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shardkit_deepspeed._options import DeepSpeedOptions


def build(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: DeepSpeedOptions
) -> Engine | None:
    """Return the engine; None where neither the user nor a file brings an optimizer. Collective."""
    device = next(model.parameters()).device
    plan = make_plan(
        strategy, options, elements=_trainable(model), world_size=dist.get_world_size(), device=device.type
    )
    if plan.optimizer is not None:
        if optimizer is None:
            optimizer = from_section(plan.optimizer, plan.source, [p for p in model.parameters() if p.requires_grad])
        else:
            check_section(plan.optimizer, plan.source, optimizer)
    if optimizer is None:
        return None
    check_tensors(model, optimizer, plan.stage)
    if plan.stage:
        check_elementwise(optimizer, plan.stage)
    if plan.half is not None:
        check_state(model, optimizer)
    library = load(device)
    if plan.half is not None:
        check_half(plan.half, plan.stage)
    restore = Restore(model)
    if plan.stage == 0:
        return _replicated(model, optimizer, strategy, plan, library, device, restore)
    return _sharded(model, optimizer, strategy, plan, library, device, restore)


def _replicated(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    plan: Plan,
    library: Any,
    device: torch.device,
    restore: Restore,
) -> Engine:
    from shardkit_deepspeed._replicated import ReplicatedEngine

    # DeepSpeed drops groups without parameters from what it is given, and would call its hooks.
    given = twin(optimizer, [{**group, "params": list(group["params"])} for group in optimizer.param_groups])
    engine = build_engine(library, model, given, plan.config, device)
    _remove_forward_hooks(engine)
    restore.built()
    restore.let_copy(plan.stage)
    return ReplicatedEngine(model, optimizer, engine, strategy, plan.bucket_size, restore)


def _sharded(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    plan: Plan,
    library: Any,
    device: torch.device,
    restore: Restore,
) -> Engine:
    from shardkit_deepspeed._partitions import PartitionEngine
    from shardkit_deepspeed._stage3 import Stage3Engine

    groups = []
    for at, group in enumerate(optimizer.param_groups):
        trained = [value for value in group["params"] if value.requires_grad and value.numel()]
        if trained:
            groups.append((at, trained))
    fragments = Fragments(optimizer, groups)
    scalars = [value for value in model.parameters() if plan.stage == 3 and value.dim() == 0]
    half = Half(model, plan.half) if plan.half is not None else None
    for value in scalars:
        value.data = value.data.view(1)
    for value in model.parameters() if plan.stage == 3 else ():
        # DeepSpeed sends memory as it lies.
        value.data = value.data.contiguous()
    try:
        engine = build_engine(library, model, fragments, plan.config, device)
        check_driven(engine.optimizer, plan.stage, library.__version__)
        if plan.stage < 3:
            _remove_forward_hooks(engine)
        restore.built()
        restore.let_copy(plan.stage)
        if plan.stage == 3:
            return Stage3Engine(
                model, optimizer, engine, fragments, strategy, half, deepspeed=library, restore=restore, scalars=scalars
            )
        return PartitionEngine(model, optimizer, engine, fragments, strategy, half, restore=restore)
    except BaseException:
        if half is not None:
            half.undo_cast()
        raise


def _remove_forward_hooks(engine: Any) -> None:
    # They start timers that nobody reads, at each call of the module.
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if hasattr(engine, name):  # older versions have none
            getattr(engine, name).remove()


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Raise unless the optimizer gives the same on pieces of a tensor as on the whole.

    Raises:
        UnsupportedError: it doesn't, or can't be tried.
    """
    found = reach(optimizer)
    if found.unit != "element":
        raise UnsupportedError(
            f"backend 'deepspeed' at stage {stage} steps with pieces of parameters, and {type(optimizer).__name__} "
            f"{found.cause}: use deepspeed:stage=0 or ddp, where it sees the whole model"
        )


def check_tensors(model: nn.Module, optimizer: Optimizer, stage: int) -> None:
    """Raise unless DeepSpeed can average and step all that the optimizer holds.

    Raises:
        UnsupportedError: names the parameter, and a strategy that can.
        InputError: there is nothing to train.
    """
    names = {id(value): name for name, value in model.named_parameters()}
    held = [value for group in optimizer.param_groups for value in group["params"]]
    trained = [value for value in held if value.requires_grad and value.numel()]
    if not trained:
        raise InputError(
            "all parameters of the optimizer are frozen or empty: there is nothing to train; thaw some, or hand over "
            "None to evaluate"
        )
    # Stage 3 shards all parameters of the module as one type.
    checked = list(model.parameters()) if stage == 3 else trained
    # At stage 0 one process has nothing to average, which is what DeepSpeed can't do in float64.
    alone = stage == 0 and dist.get_world_size() == 1
    good = (torch.float32, torch.float64) if alone else (torch.float32,)
    for value in checked:
        if value.dtype not in good:
            raise UnsupportedError(
                f"backend 'deepspeed' at stage {stage} trains {' and '.join(str(kind) for kind in good)} in precision "
                f"fp32, and parameter {names[id(value)]!r} is {value.dtype}: use ddp"
            )
        if stage == 3 and value.numel() == 0:
            raise UnsupportedError(
                f"backend 'deepspeed' at stage 3 can't gather parameter {names[id(value)]!r}, which has no elements: "
                "make it a buffer, or use deepspeed:stage=2 or ddp"
            )
    pair = sharing(dict(model.named_parameters())) if stage else None
    if pair is not None:
        raise UnsupportedError(
            f"backend 'deepspeed' at stage {stage} moves parameters into memory of its own, and {pair[0]!r} and "
            f"{pair[1]!r} share memory, which would part: make them one parameter, or use deepspeed:stage=0 or ddp"
        )
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            weight = f"{name}.weight".lstrip(".")
            raise UnsupportedError(
                f"backend 'deepspeed' averages dense gradients only, and those of {weight!r} are sparse: "
                "build it with sparse=False, or use ddp"
            )


def check_state(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless the state that the optimizer holds can be sharded, on every rank and not on those that hold a part.

    Raises:
        UnsupportedError: names the entry.
    """
    nothing = Fragment(0, 0, 0, 0)
    for name, value in model.named_parameters():
        if value in optimizer.state:
            carried_state(optimizer.state[value], value.shape, nothing, name)


def _trainable(model: nn.Module) -> int:
    return sum(math.prod(value.shape) for value in model.parameters() if value.requires_grad)
