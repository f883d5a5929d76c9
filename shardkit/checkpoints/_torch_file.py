"""Files that ``torch.save`` wrote: read without running what they say, unless that was asked for."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from shardkit._imported import Imported
from shardkit.errors import CheckpointError

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "network")
OPTIMIZER_KEYS = (
    "optimizer",
    "optimizer_state_dict",
    "optim",
    "optim_state_dict",
    "optimizer_state",
    "optimizer_states",
    "opt",
)
STEP_KEYS = ("global_step", "global_steps", "num_updates")


def load(path: Path | IO[bytes], known: Mapping[str, Callable[..., Any]], *, allow_pickle: bool) -> Any:
    """Return what ``torch.save`` wrote, on the CPU, mapped from the disk where the file allows."""
    name = str(path) if isinstance(path, Path) else str(getattr(path, "name", "a part of it"))
    try:
        archive = zipfile.is_zipfile(path)
        if isinstance(path, Path):
            path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"can't read {name!r}: {error.strerror}") from error
    # Files from before torch 1.6 can't be mapped.
    arguments: dict[str, Any] = {"map_location": "cpu", "mmap": archive and isinstance(path, Path)}
    if not isinstance(path, Path):
        path.seek(0)
    try:
        with torch.serialization.safe_globals([(stand_in, full) for full, stand_in in known.items()]):
            return torch.load(path, weights_only=True, **arguments)
    except Exception as error:
        wanted = _wanted(error, archive)
        if wanted is None:
            raise CheckpointError(f"{name!r} is damaged, or no file of torch.save: {_why(error)}") from error
        if not allow_pickle:
            raise CheckpointError(
                f"{name!r} needs {wanted}, which could run code of the file's author: if you trust the file, allow it "
                "with allow_pickle=True, or --allow-pickle on the command line"
            ) from error
    try:
        if not isinstance(path, Path):
            path.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=False, **arguments)
    except Exception as error:
        raise CheckpointError(f"{name!r} can't be read: {type(error).__name__}: {_why(error)}") from error


def read(path: Path, content: Any) -> Imported:
    """Return what a file holds that has a model's state dict, alone or beside an optimizer's.

    Raises:
        CheckpointError: it has none, or more than one.
    """
    return from_dictionary(str(path), "file of torch.save", content)


def from_dictionary(place: str, kind: str, content: Any) -> Imported:
    """Return what a dictionary of state dicts holds.

    Raises:
        CheckpointError: it has no model, or more than one.
    """
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{place!r} holds a {type(content).__name__}, not a dictionary of state dicts")
    if _is_state_dict(content):
        weights, _ = stripped(content)
        return Imported(kind=f"{kind}, of a model alone", **_weights(weights, place))
    model_key = _only(place, "model", MODEL_KEYS, content, _is_state_dict)
    if model_key is None:
        raise CheckpointError(
            f"{place!r} has no model: its keys are {_listed(content)}, and none of {', '.join(MODEL_KEYS)} holds a "
            "dictionary of tensors by name"
        )
    weights, prefix = stripped(content[model_key])
    optimizer_key = _only(place, "optimizer", OPTIMIZER_KEYS, content, lambda value: _one_optimizer(value) is not None)
    optimizer = None if optimizer_key is None else _one_optimizer(content[optimizer_key])
    if optimizer is not None:
        optimizer = _without_prefix(optimizer, prefix)
    rest = {key: value for key, value in content.items() if key not in (model_key, optimizer_key)}
    steps = {value for key, value in rest.items() if key in STEP_KEYS and type(value) is int}
    return Imported(
        kind=f"{kind}, of {'a model alone' if optimizer is None else 'a model and its optimizer'}",
        optimizer=optimizer,
        steps=steps.pop() if len(steps) == 1 else None,
        state=rest,
        **_weights(weights, place),
    )


def stripped(weights: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a state dict without what a wrapper put before all names, and that prefix."""
    prefix = ""
    names = [name for name in weights if name != "_metadata"]
    while names:
        found = next((one for one in ("module.", "_orig_mod.") if all(name.startswith(one) for name in names)), None)
        if found is None:
            break
        prefix += found
        names = [name.removeprefix(found) for name in names]
    return {name.removeprefix(prefix): value for name, value in weights.items()}, prefix


def _without_prefix(optimizer: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    def plain(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    groups = []
    for group in optimizer["param_groups"]:
        names = {key: [plain(name) for name in group[key]] for key in ("params", "param_names") if key in group}
        groups.append({**group, **names})
    return {"state": {plain(key): value for key, value in optimizer["state"].items()}, "param_groups": groups}


def _weights(weights: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    extra: dict[str, Any] = {}
    for name, value in weights.items():
        if name == "_extra_state" or name.endswith("._extra_state"):
            extra[name.removesuffix("_extra_state").removesuffix(".")] = value
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{name!r} of the model in {place!r} is a {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided:
            raise CheckpointError(f"{name!r} of the model in {place!r} is of {value.layout}, which can't be imported")
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        found[name] = value
    return {"weights": found, "aliases": aliases, "extra": extra}


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(key, str) for key in value) and all(
        isinstance(item, torch.Tensor) or key.endswith("_extra_state") for key, item in value.items()
    )


def _one_optimizer(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    ):
        return value
    return None


def _only(
    place: str, what: str, keys: tuple[str, ...], content: Mapping[str, Any], fits: Callable[[Any], bool]
) -> str | None:
    found = [key for key in keys if key in content and fits(content[key])]
    others = [key for key in content if key not in found and fits(content[key])]
    if len(found) > 1 or (others and what == "optimizer"):
        raise CheckpointError(
            f"{place!r} has more than one {what}: {_listed([*found, *others])}. A checkpoint holds one: save it anew "
            f"with that one under {keys[0]!r}"
        )
    if what == "optimizer" and not found:
        # Of a form that isn't known: its state must not be lost without a word.
        unknown = [key for key in keys if content.get(key)]
        if unknown:
            raise CheckpointError(
                f"{unknown[0]!r} in {place!r} isn't what torch.optim's state_dict gives: it has no 'state' and "
                "'param_groups' with the parameters of each group"
            )
    return found[0] if found else None


def _wanted(error: Exception, archive: bool) -> str | None:
    """Return what a file mentions beside tensors and plain values, from torch's words; None if it is damaged."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    found = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error))
    if found:
        return found.group(1)
    return "more than tensors and plain values" if archive else None


def _why(error: Exception) -> str:
    text = str(error).partition("WeightsUnpickler error:")
    lines = (text[2] or text[0]).strip().splitlines()
    return (lines or [type(error).__name__])[0].partition(". ")[0]


def _listed(keys: Any) -> str:
    names = [repr(key) for key in keys]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
