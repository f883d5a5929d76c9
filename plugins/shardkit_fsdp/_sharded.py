"""What may be done with a parameter while it is in shards: facts, hooks, writing; it is gathered for an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from shardkit_fsdp._held import Held

    _Tensor = Tensor
else:
    _Tensor = object

_INSTEAD = "use zero or ddp"


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Properties whose values are elements and not facts.
VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
FACTS = names(
    """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_inference
    get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad is_contiguous stride
    storage_offset __hash__ __len__ has_names is_same_size _is_view dim_order result_type can_cast
    broadcast_tensors get_default_dtype is_tensor is_storage is_conj is_neg _is_zerotensor
    is_distributed is_shared is_pinned
    """
)
# In place, element by element: each rank does it to its own.
_ELEMENTWISE = names(
    """
    copy_ mul_ add_ sub_ div_ fill_ zero_ lerp_ clamp_ clamp_min_ clamp_max_ neg_ abs_ sqrt_ square_ pow_
    addcmul_ addcdiv_ masked_fill_ nan_to_num_ sign_ exp_ log_ round_ multiply_ subtract_ divide_ clip_
    """
)
# What leaves the device or the graph is done for a look, often on one rank.
_LOOKS = names(
    """
    cpu cuda numpy tolist item to double float half bfloat16 type data_ptr storage untyped_storage __array__
    __reduce_ex__ __deepcopy__ share_memory_ pin_memory __dlpack__ __contains__ __bool__ __float__ __int__
    _typed_storage is_set_to equal __format__
    """
)
# Layers, which may run without gradients too.
_LAYERS = frozenset({"torch.nn.functional", "torch._C._nn", "torch.nn.modules"})
_LAYER_NAMES = names(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding layer_norm rms_norm
    batch_norm group_norm instance_norm matmul mm bmm addmm baddbmm addbmm mv dot einsum bilinear prelu
    __matmul__ __rmatmul__ native_layer_norm
    """
)


class Sharded(_Tensor):
    """What the classes of parameters in shards have in common."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            prop = func.__self__.__name__
            if prop not in VALUES and prop != "data":
                return plainly(func, args, kwargs)
            if prop == "data":
                return alias(_held(args[0])) if name == "__get__" else _write("copy_", _held(args[0]), args[1:], {})
        elif name in FACTS:
            return plainly(func, args, kwargs)
        elif name == "__repr__":
            return f"<parameter of shape {tuple(args[0].shape)}, in shards of backend 'fsdp'>"
        elif name in _LOOKS:
            _refuse_look(name)
        elif name == "detach":
            return alias(_held(args[0]))
        writes = name.endswith("_") and (not name.endswith("__") or name in ("__setitem__",))
        if writes and any(True for _ in _sharded(args[:1])):
            if name not in _ELEMENTWISE or not isinstance(args[0], Sharded):
                raise UnsupportedError(
                    f"backend 'fsdp' shards the parameters, and {name} can't be done to each rank's part by itself: "
                    f"bring new weights with load_state_dict, or {_INSTEAD}"
                )
            if torch.is_grad_enabled() and args[0].requires_grad and not isinstance(args[0], _Alias):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            _write(name, _held(args[0]), args[1:], kwargs)
            return args[0]
        if any(True for _ in _sharded([kwargs.get("out")])):
            raise UnsupportedError(f"backend 'fsdp' shards the parameters, and {name} can't write into one")
        found = list(_sharded([*args, *kwargs.values()]))
        if any(isinstance(value, _Alias) for value in found):
            _refuse_look(name)
        module = getattr(func, "__module__", None)
        is_layer = name in _LAYER_NAMES or module in _LAYERS
        homes = list({id(value._shardkit_held.home): value._shardkit_held.home for value in found}.values())
        if not torch.is_grad_enabled() and not is_layer and not all(home.is_whole for home in homes):
            _refuse_look(name)
        return _gathered(homes, lambda: _called(func, name, args, kwargs), name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class _Alias(Sharded, torch.Tensor):
    """What ``parameter.data`` and ``parameter.detach()`` give: to be written to."""


def alias(held: Held) -> Tensor:
    """Return a tensor that stands for a parameter in shards, outside of any graph."""
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.Tensor._make_subclass(_Alias, held._stub)
    found._shardkit_held = held  # type: ignore[attr-defined]
    return found


@cache
def sharded_kind(kind: type) -> type:
    """Return the class that parameters of a class have while they are in shards."""
    members = {name: vars(Sharded)[name] for name in ("__torch_function__", "__deepcopy__", "__reduce_ex__")}
    made: type = type(kind)(
        kind.__name__, (Sharded, kind), {**members, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    return made


def refuse_copy(*_: Any) -> NoReturn:
    """Say what to do in the place of copying a module or parameter in shards."""
    raise UnsupportedError(
        "backend 'fsdp' shards the parameters, and a copy of the module would be without them: load "
        f"session.full_weights() into a fresh module, close the session first, or {_INSTEAD}"
    )


def _refuse_look(name: str) -> NoReturn:
    raise UnsupportedError(
        f"backend 'fsdp' shards the parameters, and {name} finds one without its elements outside of its module: take "
        f"session.full_weights(), look within session.evaluate(), or {_INSTEAD}"
    )


def _held(value: Any) -> Held:
    held: Held = value._shardkit_held
    return held


def plainly(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch with parameters taken for plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _called(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    from shardkit_fsdp._lowered import call

    return call(func, name, args, kwargs)


def _sharded(values: Any) -> Iterator[Any]:
    """Yield the parameters in shards among arguments, also those in lists."""
    for value in values:
        if isinstance(value, Sharded):
            yield value
        elif isinstance(value, tuple | list):
            yield from _sharded(value)


def _write(name: str, held: Held, args: Any, kwargs: dict[str, Any]) -> None:
    """Write in place what is an operation on each element by itself into this rank's own."""

    def own(given: Any) -> Any:
        if isinstance(given, Sharded):
            other: Held = _held(given)
            if other.shape != held.shape:
                _refuse_look(name)
            return other.local
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        if given.shape != held.shape:
            given = given.expand(held.shape)
        return given.reshape(-1)[held.start : held.start + held.local.numel()]

    local = held.local
    with torch.no_grad():
        getattr(local, name)(*map(own, args), **{key: own(given) for key, given in kwargs.items()})
    # What was gathered before is no longer so.
    if not held.home.is_whole:
        held.home.reshard_now()


def _gathered(homes: list[Any], call: Callable[[], Any], name: str) -> Any:
    """Run an operation outside of the modules whose parameters it takes, with these gathered. Collective."""
    before = [home.is_unsharded for home in homes]
    for home in homes:
        home.gather_now()
    try:
        for home in homes:
            home.state.begin()
        out = call()
        if any(home.owns(out) for home in homes):
            if not torch.is_grad_enabled():
                _refuse_look(name)
            out = out.clone()
        for home in homes:
            home.state._register_pre_backward_hook(out)
    finally:
        for home, was in zip(homes, before, strict=True):
            if home.is_whole:
                continue
            if was or torch._C._current_graph_task_id() != -1:
                home.hide()
            else:
                home.reshard_now()
    return out
