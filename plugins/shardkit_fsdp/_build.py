"""From a model and an optimizer to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardkit import Engine, Strategy
from shardkit.errors import InputError, StrategyError, UnsupportedError
from shardkit.optimizers import reach
from shardkit.parameters import sharing
from shardkit_fsdp._engine import FSDPEngine
from shardkit_fsdp._state import check_state

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardkit_fsdp._options import FSDPOptions

_DRIVEN = {
    FSDPParam: "init_unsharded_param to_sharded to_unsharded alloc_all_gather_outputs _setattr_on_modules "
    "init_dtype_attrs reset_sharded_param _get_grad_inner_tensor",
    FSDPParamGroup: "unshard wait_for_unshard reshard _to_sharded pre_forward post_forward pre_backward post_backward "
    "finalize_backward _record_post_forward _reset_iter_state",
    FSDPState: "_register_root_post_backward_final_callback _register_pre_backward_hook _lazy_init _pre_backward "
    "_root_post_backward_final_callback _reset_iter_state",
}


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FSDPOptions) -> Engine:
    """Return the engine. Collective."""
    check_driven()
    check_parameters(model, optimizer)
    found = reach(optimizer)
    if found.unit != "element":
        instead = "zero, where it sees whole tensors" if found.unit == "parameter" else "ddp, where it sees all of them"
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"backend 'fsdp' steps with pieces of parameters, and {name} {found.cause}: use {instead}"
        )
    check_state(model, optimizer)
    return FSDPEngine(model, optimizer, strategy, options)


def check_gather(strategy: Strategy, options: FSDPOptions) -> None:
    """Raise unless the strategy has the precision that parameters are to be gathered in.

    Raises:
        StrategyError: it has none but float32.
    """
    if options.gather == "low" and strategy.precision == "fp32":
        raise StrategyError(
            "option gather='low' of backend 'fsdp' gathers parameters in the strategy's precision, and that is fp32: "
            "add precision=bf16 or precision=fp16, or leave gather out"
        )


def check_driven() -> None:
    """Raise unless torch's FSDP has what is driven here.

    Raises:
        UnsupportedError: names what is missing.
    """
    for kind, names in _DRIVEN.items():
        for name in names.split():
            if not hasattr(kind, name):
                import torch

                raise UnsupportedError(
                    f"backend 'fsdp' drives {kind.__name__}.{name} of torch, which torch {torch.__version__} doesn't "
                    "have: use torch 2.13, or ddp"
                )


def check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless all parameters can be put in shards.

    Raises:
        UnsupportedError: names the parameter, and a strategy that can.
        InputError: there is nothing to train.
    """
    held = [value for group in optimizer.param_groups for value in group["params"]]
    if not any(value.requires_grad and value.numel() for value in held):
        raise InputError(
            "all parameters of the optimizer are frozen or empty: there is nothing to train; thaw some, or hand over "
            "None to evaluate"
        )
    pair = sharing(dict(model.named_parameters()))
    if pair is not None:
        raise UnsupportedError(
            f"backend 'fsdp' moves parameters into memory of its own, and {pair[0]!r} and {pair[1]!r} share memory, "
            "which would part: make them one parameter, or use ddp"
        )
