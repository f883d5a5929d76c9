"""Ranks for tests: fresh processes, forked from a server that has imported the heavy libraries once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeVar

from shardkit._forked import fork
from shardkit._launch import collect, prepared_call

T = TypeVar("T")

_preloaded = ["torch", "torch.distributed", "torch.optim", "shardkit.testing._preload"]


def preload(*modules: str) -> None:
    """Have the server that forks ranks import these importable modules too. Call it before the first ``run``."""
    _preloaded.extend(modules)


def run(function: Callable[..., T], *arguments: object, processes: int = 2, timeout: float = 120) -> list[T]:
    """Call ``function(*arguments)`` on fresh ranks and return their results, as :func:`shardkit.launch` does.

    The ranks start in a fraction of a second, since a server that imported torch forks them. Each computes with one
    thread and turns warnings into errors. ``timeout`` is in seconds.

    Raises:
        LaunchError: a rank failed or the time is up.
    """
    with prepared_call(function, arguments, processes) as (call, results, environments):
        pairs = zip(results, environments, strict=True)
        started = fork(_server(), _rank, [(call, result, environment) for result, environment in pairs])
        return collect(started, results, timeout)


def _rank(call: Path, result: Path, environment: dict[str, str]) -> None:
    import torch

    from shardkit import _worker

    # What the server imported is no garbage: no collection in a rank needs to walk through it.
    gc.freeze()
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    _worker.main(call, result)


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context
