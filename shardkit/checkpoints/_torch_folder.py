"""Folders that ``torch.distributed.checkpoint`` wrote, read without running what they say."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from shardkit._imported import Imported, Source
from shardkit.checkpoints._torch_file import from_dictionary, load
from shardkit.errors import CheckpointError

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}
"""What the metadata of such a folder mentions. None of it does more than hold values."""


def read(source: Source) -> Imported:
    """Return what a folder holds: a model's state dict, alone or beside an optimizer's.

    Raises:
        CheckpointError: a file is missing, damaged, or mentions a class that isn't part of the format.
    """
    metadata = _metadata(source)
    folder = source.path
    places: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((index, info))
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    content: dict[Any, Any] = {}
    for name, found in metadata.state_dict_metadata.items():
        value = _value(source, folder, name, found, places.get(name, []))
        _put(content, tuple(paths.get(name, (name,))), value)
    return from_dictionary(
        str(folder), "folder of torch.distributed.checkpoint", {key: _tidy(value) for key, value in content.items()}
    )


def _metadata(source: Source) -> Metadata:
    path = source.path / METADATA
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r} {error}") from error
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{str(path)!r} is damaged: it holds a {type(found).__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format | torch.layout)
        if name in _CLASSES.get(module, ()) or (module == "torch" and plain):
            return super().find_class(module, name)
        raise CheckpointError(
            f"mentions {module}.{name}, which is no part of a folder of torch.distributed.checkpoint and could run "
            "code of its author: it isn't read"
        )


def _value(source: Source, folder: Path, name: str, found: Any, places: list[tuple[Any, Any]]) -> Any:
    if isinstance(found, BytesStorageMetadata):
        if len(places) != 1:
            raise CheckpointError(f"the metadata of {str(folder)!r} doesn't say where {name!r} is")
        return _load(source, folder, name, places[0][1])
    assert isinstance(found, TensorStorageMetadata)
    shape = tuple(found.size)
    parts = {tuple(index.offset or ()): info for index, info in places}
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
    missing = [offsets for offsets, _ in chunks if offsets not in parts]
    # Chunks don't overlap: as many elements as the tensor has are all of it.
    if missing or sum(torch.Size(sizes).numel() for _, sizes in chunks) != torch.Size(shape).numel():
        raise CheckpointError(f"the metadata of {str(folder)!r} lacks parts of {name!r} {shape}")
    whole = None
    for offsets, sizes in chunks:
        part = _load(source, folder, name, parts[offsets])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes:
            raise CheckpointError(f"{str(folder)!r} is damaged: what it has of {name!r} isn't of the shape {sizes}")
        if sizes == shape:
            return part.detach()
        if whole is None:
            whole = torch.empty(shape, dtype=part.dtype)
        region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        whole[region] = part.detach()
    return torch.empty(shape, dtype=found.properties.dtype) if whole is None else whole


def _load(source: Source, folder: Path, name: str, info: Any) -> Any:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{str(folder)!r} holds {name!r} compressed or otherwise changed, which can't be read")
    path = folder / info.relative_path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"the metadata of {str(folder)!r} points outside of it, to {str(path)!r}")
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r}: {error.strerror}") from error
    if len(data) != info.length:
        raise CheckpointError(f"{str(path)!r} is damaged: it ends within {name!r}")
    part = io.BytesIO(data)
    part.name = f"{path}, {name}"
    return load(part, {}, allow_pickle=source.allow_pickle)


def _put(content: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content.setdefault(key, {})
    content[path[-1]] = value


def _tidy(value: Any) -> Any:
    """Return a dictionary with the lists that it was written with, and an optimizer's state in one form."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value):
        return _unflattened(value)
    found = {key: _tidy(item) for key, item in value.items()}
    if "param_groups" in found and isinstance(found["param_groups"], list):
        state = found.setdefault("state", {})
        numbers = {str(one): one for group in found["param_groups"] for one in group.get("params", ())}
        # Keys that were numbers come back as strings.
        found["state"] = {numbers.get(str(key), key): entries for key, entries in state.items()}
    if found and set(found) == set(range(len(found))):
        return [found[number] for number in range(len(found))]
    return found


def _unflattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state that was written flat, as ``state.<parameter>.<key>`` and
    ``param_groups.<parameter>.<setting>``: parameters of the same settings make up a group."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for flat, item in value.items():
        kind, _, rest = flat.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else settings).setdefault(name, {})[key] = item
    groups: list[dict[str, Any]] = []
    for name, own in settings.items():
        group = next((one for one in groups if {k: v for k, v in one.items() if k != "params"} == own), None)
        if group is None:
            groups.append({**own, "params": [name]})
        else:
            group["params"].append(name)
    return {"state": state, "param_groups": groups}
