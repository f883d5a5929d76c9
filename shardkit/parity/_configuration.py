"""The resolved configuration of a backend's library, read off the objects that it made, with all its defaults.

No plugin needs code for this. Of all objects that can be reached from the engine, those of the library's own classes
are asked: a configuration object (a dataclass, a pydantic model, or a class whose name ends in Config) for its fields,
any other for what its constructor takes, by the attribute of that name or else by the constructor's own default.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_TORCH = ("torch.nn.parallel", "torch.distributed")
"""What of torch is a backend's library, for one that has no other."""

_DEPTH = 6
_MOST_OBJECTS = 20_000


def configuration(engine: Any, library: str | None) -> dict[str, Any]:
    """Return settings by ``Class.name``, as JSON, of the library's objects under an engine."""
    roots = _TORCH if library is None else (library, *_TORCH)
    found: dict[str, Any] = {}
    for item in _reachable(engine, roots):
        kind = type(item)
        for name, value in _settings(item):
            for place, held in _flat(f"{kind.__name__}.{name}", plain(value)):
                found.setdefault(place, held)
    return dict(sorted(found.items()))


def _flat(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings in a nest of mappings, each by itself: one that is new changes none of the others."""
    if isinstance(value, dict) and value:
        for name, held in value.items():
            yield from _flat(f"{place}.{name}", held)
    else:
        yield place, value


class _Nothing:
    """What isn't plain."""


_NONE = _Nothing()


def plain(value: Any) -> Any:
    """Return a value as JSON: numbers that aren't finite and classes as strings; what is no setting as its type."""
    found = _plain(value)
    return f"<{type(value).__name__}>" if found is _NONE else found


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return _plain(value.item()) if value.numel() == 1 and not value.is_meta else _NONE
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
        return _NONE if any(item is _NONE for item in items) else items
    if isinstance(value, Mapping):
        held = {str(name): _plain(item) for name, item in value.items()}
        return {name: item for name, item in held.items() if item is not _NONE}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return _NONE


def _settings(item: Any) -> Iterator[tuple[str, Any]]:
    kind = type(item)
    if dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield field.name, getattr(item, field.name, None)
        return
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__fields__", None)
    if isinstance(fields, Mapping):
        for name in fields:
            yield name, getattr(item, name, None)
        return
    held = vars(item) if hasattr(item, "__dict__") else {}
    if kind.__name__.endswith("Config"):
        yield from ((name, value) for name, value in held.items() if not name.startswith("_"))
        return
    for name, parameter in _parameters(kind):
        if name in held or f"_{name}" in held:
            yield name, held.get(name, held.get(f"_{name}"))
        elif parameter.default is not inspect.Parameter.empty:
            yield name, parameter.default


def _parameters(kind: type) -> Iterator[tuple[str, inspect.Parameter]]:
    try:
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    except (ValueError, TypeError):
        return
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            yield name, parameter


def _reachable(engine: Any, roots: tuple[str, ...]) -> Iterator[Any]:
    """Yield the library's objects, breadth first, through nothing but these and what the plugin made."""
    seen: set[int] = set()
    waiting: deque[tuple[Any, int]] = deque([(engine, 0)])
    while waiting and len(seen) < _MOST_OBJECTS:
        item, depth = waiting.popleft()
        if id(item) in seen or isinstance(item, torch.Tensor | torch.nn.Parameter | str | bytes | type):
            continue
        seen.add(id(item))
        module = type(item).__module__ or ""
        ours = (
            item is engine
            or module == type(engine).__module__.partition(".")[0]
            or _under(module, (type(engine).__module__.partition(".")[0],))
        )
        theirs = _under(module, roots)
        if theirs:
            yield item
        if depth >= _DEPTH:
            continue
        if isinstance(item, Mapping):
            waiting.extend((value, depth + 1) for value in list(item.values())[:64])
        elif isinstance(item, list | tuple):
            waiting.extend((value, depth + 1) for value in item[:64])
        elif (theirs or ours) and hasattr(item, "__dict__"):
            waiting.extend((value, depth + 1) for value in list(vars(item).values()))


def _under(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)
