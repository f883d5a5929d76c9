"""Parameters that are whole in low precision: low to what multiplies with them in autocast, float32 to all else."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardkit.errors import UnsupportedError
from shardkit_fsdp._sharded import FACTS, VALUES, Sharded, names, plainly, refuse_copy

if TYPE_CHECKING:
    from torch import nn

    from shardkit_fsdp._held import Held

    _Tensor = Tensor
else:
    _Tensor = object

# What autocast computes in low precision on every device, so that a copy in float32 would be for nothing.
_MULTIPLY = names(
    """
    linear matmul mm bmm addmm addbmm baddbmm __matmul__ __rmatmul__ conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d multi_head_attention_forward
    """
)
_MEMORY = names("data_ptr storage untyped_storage _typed_storage __dlpack__ share_memory_ is_set_to")
_IN_PLACE = names("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__ __imatmul__")


class Lowered(_Tensor):
    """What the classes of parameters that are whole in low precision have in common.

    The parameter itself stays float32, without memory, so that autograd gives it float32 gradients and adds up those
    of several uses in float32.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Sharded) for kind in types):
            # It gathers those, and then comes back to ``call``.
            return Sharded.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            prop = func.__self__.__name__
            if prop == "data":
                return _use(args[0], torch.float32).detach() if name == "__get__" else _refuse_write(name)
            if prop not in VALUES:
                return plainly(func, args, kwargs)
        elif name in FACTS:
            return plainly(func, args, kwargs)
        return call(func, name, args, kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


@cache
def lowered_kind(kind: type) -> type:
    """Return the class that parameters of a class have while they are whole in low precision."""
    members = {name: vars(Lowered)[name] for name in ("__torch_function__", "__deepcopy__", "__reduce_ex__")}
    made: type = type(kind)(
        kind.__name__, (Lowered, kind), {**members, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    return made


def call(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function of torch with its parameters in the precision that it computes in."""
    found = [*_lowered([*args, *kwargs.values()])]
    if not found:
        return plainly(func, args, kwargs)
    writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if (writes and any(True for _ in _lowered(args[:1]))) or isinstance(kwargs.get("out"), Lowered):
        _refuse_write(name)
    if name in _MEMORY:
        if torch._guards.TracingContext.try_get() is not None:
            # The compiler runs what it can't trace as it is.
            from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

            raise UnsupportedFakeTensorException("a parameter that backend 'fsdp' gathers in low precision")
        raise UnsupportedError(
            f"backend 'fsdp' gathers this parameter in low precision, and {name} looks for float32 numbers in its "
            "memory: use gather=fp32"
        )
    if name in ("embedding", "embedding_bag") and (kwargs.get("max_norm") or (len(args) > 3 and args[3])):
        _refuse_write(f"{name} with max_norm")
    if func is functional.embedding:
        return _embedding(*args, **kwargs)
    held: Held = found[0]._shardkit_held
    device = held.device.type
    low = name in _MULTIPLY and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is held.low
    dtype = held.low if low else torch.float32

    def replaced(value: Any) -> Any:
        if isinstance(value, Lowered):
            return _use(value, dtype)
        if type(value) in (tuple, list):
            return type(value)(map(replaced, value))
        return value

    return func(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})


def _lowered(values: Any) -> Any:
    for value in values:
        if isinstance(value, Lowered):
            yield value
        elif type(value) in (tuple, list):
            yield from _lowered(value)


def _refuse_write(name: str) -> NoReturn:
    raise UnsupportedError(
        f"backend 'fsdp' shards the parameters, so that what {name} would write into one while its module runs would "
        "be lost: write outside of the forward, or use zero or ddp"
    )


def _use(value: Any, dtype: Any) -> Tensor:
    held: Held = value._shardkit_held
    if not (torch.is_grad_enabled() and value.requires_grad):
        return held.lowered(dtype)
    used: Tensor = _Use.apply(value, held, dtype)  # type: ignore[no-untyped-call]
    return used


class _Use(torch.autograd.Function):
    """What autocast's cast of a float32 weight is: its gradient goes on in float32."""

    @staticmethod
    def forward(ctx: Any, value: nn.Parameter, held: Held, dtype: torch.dtype) -> Tensor:
        return held.lowered(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.float(), None, None


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look rows up without a copy of the table, and with a gradient that is summed in float32."""
    if sparse:
        return functional.embedding(input, _use(weight, torch.float32), padding_idx, sparse=True)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return functional.embedding(input, weight._shardkit_held.lowered(None), padding_idx).float()
    found: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        weight, input, weight._shardkit_held, padding_idx, scale_grad_by_freq
    )
    return found


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, input: Tensor, held: Held, padding: int | None, by_frequency: bool) -> Tensor:
        table = held.lowered(None)
        ctx.save_for_backward(input)
        rows = len(table)
        ctx.settings = rows, -1 if padding is None else padding % rows, by_frequency
        return functional.embedding(input, table, padding).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient, input, *ctx.settings), None, None, None, None
