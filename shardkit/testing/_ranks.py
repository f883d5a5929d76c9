"""Ranks for tests: fresh processes, forked from a server that has imported the heavy libraries once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TypeVar

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
        started = [
            _Forked(_server().Process(target=_rank, args=(call, result, environment), daemon=True))
            for result, environment in zip(results, environments, strict=True)
        ]
        return collect(started, results, timeout)


class _Forked:
    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


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
