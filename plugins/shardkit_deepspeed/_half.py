"""Weights in bf16 or fp16 on every rank, beside float32 masters that are sharded and that the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardkit.errors import UnsupportedError
from shardkit.nested import map_tensors

if TYPE_CHECKING:
    from shardkit_deepspeed._fragments import Fragments

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Some of their kernels take no weights of less precision than the input or the statistics.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def check_half(precision: str, stage: int) -> None:
    """Raise unless DeepSpeed trains weights of this precision on its accelerator.

    Raises:
        UnsupportedError: names what can.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = accelerator.is_fp16_supported() if precision == "fp16" else accelerator.is_bf16_supported()
    if not supported:
        other = "precision=bf16 with half_weights" if precision == "fp16" else "precision=fp32"
        raise UnsupportedError(
            f"backend 'deepspeed' can't keep weights in {precision} on {accelerator.device_name()}, which DeepSpeed "
            f"says doesn't support it: use precision={precision} without half_weights (deepspeed:stage={stage},"
            f'precision={precision}; in a file "torch_autocast": {{"enabled": true}}), or {other}'
        )


@final
class Half:
    """The float32 values that a module had before DeepSpeed cast it, and what half-precision weights need around it."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.dtype = _DTYPES[precision]
        self._model = model
        # DeepSpeed puts other tensors in their place, so these are no copies.
        self._before = {id(value): value.data for value in model.parameters()}
        self._kinds = {id(value): value.dtype for value in model.parameters()}
        self.on_load: Callable[[nn.Parameter, Tensor], None] = ignore
        """Called with a parameter and what ``load_state_dict`` is about to give it."""
        self._handles: list[Any] = []

    def fill(self, fragments: Fragments, params: list[nn.Parameter]) -> None:
        """Write the values from before the cast into the masters, which DeepSpeed made from rounded ones."""
        for index, value in enumerate(params):
            write(fragments, index, self._before[id(value)])
        self._before.clear()

    def undo_cast(self) -> None:
        """Give the parameters back as they were before DeepSpeed cast them: it failed to build."""
        self.detach()
        for value in self._model.parameters():
            value.data = self._before.pop(id(value), value.data)

    def attach(self) -> None:
        """Cast the module's inputs, and have it normalize with float32 weights and statistics."""
        cast = self._model.register_forward_pre_hook(self._lower_inputs, with_kwargs=True, prepend=True)
        self._handles.append(cast)
        for part in self._model.modules():
            if isinstance(part, _NORMS) and any(value is not None for value in part._parameters.values()):
                # After DeepSpeed has gathered the weights, and before it shards them again.
                self._handles.append(part.register_forward_pre_hook(_raise_weights))
                self._handles.append(part.register_forward_hook(_lower_weights, prepend=True, always_call=True))
            self._handles.append(part.register_load_state_dict_pre_hook(self._note))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def restore_types(self, trained: list[nn.Parameter]) -> None:
        """Give the parameters that have no master their own types back."""
        ids = {id(value) for value in trained}
        for value in self._model.parameters():
            kind = self._kinds.get(id(value), value.dtype)
            if id(value) not in ids and value.dtype is not kind:
                value.data = value.data.to(kind)

    def kind(self, value: Tensor) -> torch.dtype:
        """Return the type that a parameter had before the cast."""
        return self._kinds.get(id(value), value.dtype)

    def _lower_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return lowered(args, self.dtype), lowered(kwargs, self.dtype)

    def _note(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Tell of the values that ``load_state_dict`` is given, before it rounds them."""
        for name, value in module._parameters.items():
            given = state.get(prefix + name)
            if value is not None and isinstance(given, Tensor) and given.numel() == value.numel():
                self.on_load(value, given)


def ignore(value: nn.Parameter, given: Tensor) -> None:
    """Take no note of a value that is loaded."""


@torch.no_grad()
def write(fragments: Fragments, index: int, whole: Tensor) -> None:
    """Write a whole parameter into this rank's part of its master."""
    flat = whole.reshape(-1)
    for fragment, view in fragments.of(index):
        view.copy_(flat.narrow(0, fragment.start, fragment.size))


def _raise_weights(module: nn.Module, args: Any) -> None:
    given = args[0].dtype if args and isinstance(args[0], Tensor) else torch.float32
    # Running statistics are float32 whatever the input is.
    if given is torch.float32 or isinstance(module, _NormBase):
        own = module.__dict__["_shardkit_own"] = module._parameters
        raised = {name: value.float() if value is not None else None for name, value in own.items()}
        module.__dict__["_parameters"] = raised


def _lower_weights(module: nn.Module, args: Any, result: Any) -> None:
    own = module.__dict__.pop("_shardkit_own", None)
    if own is not None:
        module.__dict__["_parameters"] = own


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """Return inputs with their floating-point tensors in a dtype, other parts as they are."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
