"""Values in a manifest: numbers, strings, tensors and containers of them as JSON, exactly and without pickle."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

from shardkit.errors import CheckpointError

_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON; its tensors go into ``tensors``, under names that begin with ``place``.

    Raises:
        CheckpointError: a part of it is none of the kinds that a checkpoint holds.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool) or type(value) in (int, str):
        return value
    if isinstance(value, int | str):
        # Of a subclass, such as an IntEnum: its value is what counts.
        return int(value) if isinstance(value, int) else str.__str__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor):
        name = _free(place, tensors)
        tensors[name] = value
        return {"$tensor": name}
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        name = _free(place, tensors)
        tensors[name] = torch.from_numpy(value.copy())
        return {"$array": name}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) is list:
        return [encode(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
    for kind_name, container in _SEQUENCES.items():
        if type(value) is container:
            items = [encode(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
            return {f"${kind_name}": items}
    for kind_name, container in _DICTS.items():
        if type(value) is container:
            return _encode_dict(value, kind_name, place, tensors)
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint holds numbers, strings, "
        "tensors, and lists, tuples and dictionaries of them"
    )


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that :func:`encode` was given, with tensors on the CPU."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, held), *_ = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag[1:], held, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def tensors_of(value: Any) -> list[str]:
    """Return the names of the tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in tensors_of(item)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1 and next(iter(value)) in ("$tensor", "$array"):
        return [next(iter(value.values()))]
    return [name for item in value.values() for name in tensors_of(item)]


def _encode_dict(value: dict[Any, Any], kind: str, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    plain = kind == "dict" and all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {key: encode(item, f"{place}/{key}", tensors) for key, item in value.items()}
    pairs = [
        [encode(key, f"{place}/key", tensors), encode(item, f"{place}/{key}", tensors)] for key, item in value.items()
    ]
    return {f"${kind}": pairs}


def _decode_tagged(tag: str, held: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if tag == "float":
        return float(held)
    if tag == "tensor":
        return tensors[held]
    if tag == "array":
        return tensors[held].numpy()
    if tag == "bytes":
        return base64.b64decode(held)
    if tag == "dtype":
        return getattr(torch, held)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(item, tensors) for item in held)
    if tag in _DICTS:
        found = _DICTS[tag]()
        for key, item in held:
            found[decode(key, tensors)] = decode(item, tensors)
        return found
    raise CheckpointError(f"the manifest holds a value of kind {tag!r}, which this version doesn't know")


def _free(place: str, tensors: dict[str, torch.Tensor]) -> str:
    name, number = place, 1
    while name in tensors:
        name, number = f"{place}#{number}", number + 1
    return name
