"""What a run was: versions, machine, environment, seeds, strategy, optimizer, and the backend's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardkit import __version__
from shardkit._options import typed_options
from shardkit.checkpoints._training import settings
from shardkit.parity._configuration import configuration, plain
from shardkit.parity._shares import own_module
from shardkit.tools.listing import distribution

if TYPE_CHECKING:
    from shardkit._backend import Backend
    from shardkit._session import Session

_PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")
"""Environment variables by which torch and what lies under it change what they compute or how fast."""

_PRIVATE = ("TORCH_EXTENSIONS_DIR", "TORCHELASTIC_")
"""Those that differ from run to run and change nothing."""


def facts_of(session: Session, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the facts of a session that is about to train, as JSON."""
    strategy, backend, optimizer = session.strategy, session.backend, session.optimizer
    module = own_module(session._engine.model, shapes)
    names = {id(value): name for name, value in module.named_parameters()}
    trainable = {name for name, value in module.named_parameters() if value.requires_grad}
    device = session._device
    return {
        "versions": versions(backend),
        "strategy": str(strategy),
        "settings": {
            **{
                item.name: plain(getattr(strategy, item.name))
                for item in dataclasses.fields(strategy)
                if item.name != "options"
            },
            "options": plain(dataclasses.asdict(typed_options(backend, strategy.options))),
        },
        "backend": backend.name,
        "world_size": session.world_size,
        "device": {
            "type": device.type,
            "name": platform.processor() or platform.machine()
            if device.type == "cpu"
            else torch.get_device_module(device).get_device_name(device),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
        "environment": _environment(backend.environment),
        "seeds": {"torch": torch.initial_seed(), "strategy": strategy.seed},
        "model": type(module).__name__,
        "parameters": {name: {"shape": list(shape), "trainable": name in trainable} for name, shape in shapes.items()},
        "optimizer": {
            "class": type(optimizer).__name__,
            "module": type(optimizer).__module__,
            "groups": [
                {**plain(settings(group)), "params": [names.get(id(value), "?") for value in group["params"]]}
                for group in optimizer.param_groups
            ],
        },
        "configuration": configuration(session._engine, backend.library),
    }


def versions(backend: Backend) -> dict[str, str]:
    """Return the versions of Python, shardkit, torch and of what is over it in this run."""
    found = {"python": platform.python_version(), "shardkit": __version__, "torch": torch.__version__}
    for name in ("transformers", "numpy", distribution(backend)):
        if name not in found:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return found


def _environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    wanted = (*_PREFIXES, *prefixes)
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted) and not name.startswith(_PRIVATE)
    }
