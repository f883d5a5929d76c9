"""Which modules gather their parameters together: the repeated blocks of a model, or those that are named."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shardkit.errors import InputError

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def units(model: nn.Module, wrap: str) -> list[nn.Module]:
    """Return the modules that are units of their own, the outer ones after those within them, the model left out.

    A module that shares a parameter with others is left to what holds them all.

    Raises:
        InputError: ``wrap`` names no module.
    """
    if wrap == "none":
        return []
    found = _repeated(model) if wrap == "auto" else _named(model, wrap)
    places = _places(model)
    inner: dict[nn.Module, None] = {}
    for unit in reversed(found):
        own = {id(part) for part in unit.modules()}
        holds = [value for part in unit.modules() for value in part._parameters.values() if value is not None]
        if unit is not model and holds and all(places[value] <= own for value in holds):
            inner[unit] = None
    return list(inner)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; a list of modules can't."""
    return not isinstance(module, _WITHOUT_FORWARD)


def _places(model: nn.Module) -> dict[Tensor, set[int]]:
    """Return which modules hold each parameter."""
    found: dict[Tensor, set[int]] = {}
    for part in model.modules():
        for value in part._parameters.values():
            if value is not None:
                found.setdefault(value, set()).add(id(part))
    return found


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Return the children of lists of modules that are all of one class, or what a transformers model doesn't split."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    told = [part for part in model.modules() if type(part).__name__ in kinds]
    return told or list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    listed = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    if listed and len(children) > 1 and len({type(child) for child in children}) == 1 and has_forward(children[0]):
        yield from children
        return
    for child in children:
        yield from _blocks(child)


def _named(model: nn.Module, wrap: str) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for pattern in wrap.split("|"):
        parts = [
            part
            for name, part in model.named_modules()
            if fnmatchcase(name, pattern) or fnmatchcase(type(part).__name__, pattern)
        ]
        if not any(has_forward(part) for part in parts):
            raise InputError(
                f"option wrap of backend 'fsdp': {pattern!r} is neither the name nor the class of a module that can be "
                "called; names are those of named_modules(), with * for any part"
            )
        found.update(dict.fromkeys(part for part in parts if has_forward(part)))
    return [part for part in model.modules() if part in found]
