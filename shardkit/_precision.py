"""Precision, the same under every backend: float32 weights, a forward pass in autocast, and a loss scale for fp16."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from shardkit.errors import InputError, UnsupportedError
from shardkit.nested import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from shardkit._strategy import Strategy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SCALE = 1.0


@final
class LossScaler:
    """What an fp16 loss is multiplied by, so that small gradients don't vanish in half precision.

    It follows ``torch.amp.GradScaler``: halved when a gradient of any rank overflows, doubled after ``window`` steps
    without. All ranks see the same overflows, so that their scales stay equal. It doesn't fall below 1.
    """

    def __init__(self, scale: float, window: int) -> None:
        self.scale = scale
        self.window = window
        self.growth_tracker = 0
        """Steps since the scale last changed."""

    def update(self, *, applied: bool) -> bool:
        """Take note of a step; return whether the scale had room to answer it."""
        if not applied:
            had_room = self.scale > _LEAST_SCALE
            self.scale, self.growth_tracker = max(self.scale / 2, _LEAST_SCALE), 0
            return had_room
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.scale, self.growth_tracker = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.growth_tracker = state["scale"], state["growth_tracker"]


def make_scaler(strategy: Strategy) -> LossScaler | None:
    """Return a new scaler for an fp16 strategy, None for others."""
    return LossScaler(strategy.loss_scale, strategy.loss_scale_window) if strategy.precision == "fp16" else None


def check_precision(module: nn.Module, precision: str, device: torch.device) -> None:
    """Raise unless the module can be trained in a precision on its device.

    Raises:
        InputError: a trainable parameter isn't float32, which lower precisions keep the weights in.
        UnsupportedError: the device can't compute in it.
    """
    dtype = DTYPES.get(precision)
    if dtype is None:
        return
    for name, value in module.named_parameters():
        if value.requires_grad and value.dtype is not torch.float32:
            raise InputError(
                f"precision {precision!r} computes in {dtype} from float32 weights, and parameter {name!r} is "
                f"{value.dtype}: convert the model with model.float(), or train in precision 'fp32'"
            )
    if not _computes(dtype, device):
        raise UnsupportedError(f"{device} doesn't compute in {dtype}: use another precision than {precision!r}")


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    if not torch.amp.is_autocast_available(device.type):
        return False
    if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        return False
    one = torch.ones(1, 1, device=device)
    with warnings.catch_warnings():
        # How autocast says that it does nothing.
        warnings.simplefilter("ignore")
        with torch.autocast(device.type, dtype):
            return torch.mm(one, one).dtype is dtype


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which operations run in a precision; one without effect for fp32."""
    dtype = DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def lower(module: nn.Module, precision: str, device: torch.device) -> Callable[[], None]:
    """Have a module's forward run in a precision, and give its results back in float32; return what undoes it."""
    dtype = DTYPES.get(precision)
    if dtype is None:
        return lambda: None
    own: Any = module.__dict__.get("forward")
    method = own is None or (isinstance(own, MethodType) and own.__self__ is module)

    if method:
        # A function bound to the module: a deep copy of the module gets a forward of its own.
        plain: Callable[..., Any] = type(module).forward if own is None else own.__func__

        @functools.wraps(plain)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype):
                result = plain(module, *args, **kwargs)
            return _raised(result, dtype)

        module.__dict__["forward"] = MethodType(forward, module)
    else:

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype):
                result = own(*args, **kwargs)
            return _raised(result, dtype)

        module.__dict__["forward"] = forward

    def undo() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    return undo


def spoil(values: list[Tensor]) -> None:
    """Make gradients that have overflowed not finite again, whatever was made of them since."""
    for value in values:
        value.fill_(torch.nan)


def _raised(value: Any, dtype: torch.dtype) -> Any:
    """Return a module's output with tensors of a low-precision dtype in float32, other parts as they are."""
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype is dtype else tensor)
