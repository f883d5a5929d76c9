"""Gradients that user code must not take for whole: to look at them is an error while a backend has them in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from shardkit.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor, nn

# What ``parameter.grad`` is, whatever class a parameter has for the moment.
GRADIENT: Any = torch._C.TensorBase.grad


@final
class Tripwire:
    """Makes ``parameter.grad`` raise from when it is armed to when it is disarmed.

    Between a window's last backward and its step, a backend that shards gradients leaves a part in ``.grad``, or
    nothing: to clip there would do nothing, silently. Parameters change their class meanwhile, as torch's own do when a
    lazy one gets its values: nothing is looked up, and nobody pays, outside of that time.
    """

    def __init__(self, model: nn.Module, backend: str) -> None:
        kinds: dict[type, list[Tensor]] = {}
        for value in model.parameters():
            if value.requires_grad:
                kinds.setdefault(type(value), []).append(value)
        self._kinds = [(kind, _armed(kind, backend), values) for kind, values in kinds.items()]
        self._is_armed = False

    def arm(self) -> None:
        """Let each look at a gradient, and each write, raise."""
        self._is_armed = True
        for _, armed, values in self._kinds:
            for value in values:
                value.__class__ = armed

    def disarm(self) -> bool:
        """Let gradients be seen again, and return whether they could not."""
        if not self._is_armed:
            return False
        self._is_armed = False
        for kind, _, values in self._kinds:
            for value in values:
                value.__class__ = kind
        return True


def disarm(tripwire: Tripwire | None) -> bool:
    """Disarm a tripwire, if there is one; return whether it was armed."""
    return tripwire is not None and tripwire.disarm()


@contextmanager
def disarmed(tripwire: Tripwire | None) -> Iterator[None]:
    """Return a context in which gradients can be seen."""
    armed = disarm(tripwire)
    try:
        yield
    finally:
        if armed and tripwire is not None:
            tripwire.arm()


@cache
def _armed(kind: type, backend: str) -> type:
    message = (
        f"backend {backend!r} keeps gradients in shards between backward and step, so that parameter.grad is a part or "
        "nothing: session.full_gradients() gives them whole; to clip, say Strategy(max_grad_norm=...)"
    )

    def refuse(*_: Any) -> NoReturn:
        raise StateError(message)

    def as_itself(name: str) -> Any:
        # What is copied or pickled in the meantime isn't armed.
        def call(value: Any, *arguments: Any) -> Any:
            value.__class__ = kind
            try:
                return getattr(value, name)(*arguments)
            finally:
                value.__class__ = armed

        return call

    members = {"grad": property(refuse, refuse, refuse), "__module__": kind.__module__, "__doc__": kind.__doc__}
    armed = type(kind)(kind.__name__, (kind,), members)
    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(armed, name, as_itself(name))
    return armed
