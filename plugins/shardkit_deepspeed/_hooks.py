"""Stage 3: what DeepSpeed's hooks on modules get wrong of outputs, and of graphs that are gone through twice."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

# Each tensor of an output counts up, each backward through it down, and at 0 DeepSpeed no longer gathers.
_NEVER_AT_ZERO = 2**40

_originals: dict[str, Any] = {}


def patch_outputs() -> None:
    """Let DeepSpeed find the tensors within dataclasses, and leave alone what has no attributes."""
    from deepspeed.runtime.zero import parameter_offload

    _originals["apply_to_tensors_only"] = parameter_offload.apply_to_tensors_only
    parameter_offload.apply_to_tensors_only = apply_to_tensors
    # Looked up there before the built-in function, which raises on an object without attributes.
    parameter_offload.vars = attributes


def unpatch_outputs() -> None:
    """Give DeepSpeed its own back."""
    from deepspeed.runtime.zero import parameter_offload

    parameter_offload.apply_to_tensors_only = _originals.pop("apply_to_tensors_only")
    del parameter_offload.vars


def apply_to_tensors(function: Callable[[Any], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """Return the value with each tensor in it replaced, in mappings, sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        return _originals["apply_to_tensors_only"](function, value)
    if isinstance(value, dict):
        # In place: it may be of a class that can't be made anew.
        for key in value:
            value[key] = apply_to_tensors(function, value[key])
        return value
    if isinstance(value, tuple | list):
        touched = [apply_to_tensors(function, item) for item in value]
        kind = type(value)
        return kind(*touched) if hasattr(kind, "_fields") else kind(touched)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also of a frozen one.
            object.__setattr__(same, field.name, apply_to_tensors(function, getattr(value, field.name)))
        return same
    return value


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, none where it has no place for them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def gather_in_every_backward(offload: Any, model: nn.Module) -> None:
    """Have a module's parameters gathered also when its graph is gone through again; refuse second derivatives.

    A graph is gone through twice where ``torch.autograd.grad`` keeps it for the session's backward. A graph of the
    gradients would need the parameters at a time when DeepSpeed has sharded them again.
    """
    for part in model.modules():
        part.applied_pre_backward_ref_cnt = _NEVER_AT_ZERO  # type: ignore[assignment]
    gather = offload.pre_sub_module_backward_function

    def before_backward(part: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backend 'deepspeed' at stage 3 shards a parameter while its module doesn't run, so that it can't go "
                "back through a gradient (second derivatives, create_graph=True): use deepspeed:stage=2 or ddp"
            )
        gather(part)

    offload.pre_sub_module_backward_function = before_backward
