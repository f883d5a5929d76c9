"""Checkpoints for the same strategy and world size: one file a rank, and a manifest that makes them visible."""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import shardkit
from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    from shardkit._processes import Processes
    from shardkit._strategy import Strategy

MANIFEST = "checkpoint.json"
FORMAT = 1

T = TypeVar("T")


def save(directory: Path, state: dict[str, Any], strategy: Strategy, processes: Processes) -> None:
    """Write every rank's state; the manifest, written last, replaces the previous one in one step. Collective."""
    processes.meet("save")
    token = processes.agree(secrets.token_hex(4))[0]
    names = [f"rank-{rank}-of-{processes.world_size}.{token}.pt" for rank in range(processes.world_size)]
    _together(processes, lambda: _write(directory / names[processes.rank], lambda file: torch.save(state, file)))
    manifest = {
        "format": FORMAT,
        "shardkit": shardkit.__version__,
        "strategy": _identity(strategy),
        "world_size": processes.world_size,
        "steps": state["steps"],
        "files": names,
    }
    _together(processes, lambda: _publish(directory, manifest) if processes.rank == 0 else None)


def load(directory: Path, strategy: Strategy, processes: Processes, signature: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's state, once every rank has read its own whole. Collective."""
    processes.meet("load")
    return _together(processes, lambda: _read(directory, strategy, processes, signature))


def _read(directory: Path, strategy: Strategy, processes: Processes, signature: dict[str, Any]) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r}: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {str(path)!r}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} is of format {manifest.get('format')!r}, and shardkit {shardkit.__version__} reads {FORMAT}"
        )
    if manifest["world_size"] != processes.world_size:
        raise CheckpointError(
            f"the checkpoint in {str(directory)!r} is of {manifest['world_size']} processes, and these are "
            f"{processes.world_size}: it loads on as many as wrote it"
        )
    if manifest["strategy"] != _identity(strategy):
        raise CheckpointError(
            f"the checkpoint in {str(directory)!r} is of strategy {manifest['strategy']}, and this session's is "
            f"{_identity(strategy)}: it loads under the strategy that wrote it"
        )
    path = directory / manifest["files"][processes.rank]
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged or missing: {error}") from error
    if state["signature"] != signature:
        raise CheckpointError(
            f"the checkpoint in {str(directory)!r} doesn't fit: {_difference(state['signature'], signature)}"
        )
    return state


def _difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    for what in [*saved, *own]:
        if saved.get(what) != own.get(what):
            return f"{what} is {saved.get(what)} in the checkpoint and {own.get(what)} here"
    return "its parameters come in another order"


def _identity(strategy: Strategy) -> dict[str, Any]:
    return {"backend": strategy.backend, "options": {name: str(value) for name, value in strategy.options.items()}}


def _together(processes: Processes, action: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, raise on all."""
    result, failure = None, None
    try:
        result = action()
    except OSError as error:
        failure = CheckpointError(f"can't write {error.filename!r}: {error.strerror}")
    except CheckpointError as error:
        failure = error
    processes.agree(None, failure)
    return result  # type: ignore[return-value]


def _write(path: Path, write: Callable[[Any], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise CheckpointError(f"can't write {str(path)!r}: {error}") from error  # how torch.save meets a full disk


def _publish(directory: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=2).encode()
    draft = directory / f"{MANIFEST}.draft"
    _write(draft, lambda file: file.write(text))
    os.replace(draft, directory / MANIFEST)
    for old in directory.glob("rank-*-of-*.*.pt"):
        if old.name not in manifest["files"]:
            old.unlink(missing_ok=True)
