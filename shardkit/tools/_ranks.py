"""The ranks of a comparison: fresh processes, forked from a server that has imported torch and the workload once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardkit._forked import fork
from shardkit._launch import collect, prepared_call
from shardkit.tools._server import start

T = TypeVar("T")


def run(
    function: Callable[..., T], *arguments: object, processes: int, timeout: float, workload: str, log: Path
) -> list[T]:
    """Call ``function(*arguments)`` on fresh ranks and return their results, as :func:`shardkit.launch` does.

    What the ranks print goes to the file ``log``. ``timeout`` is in seconds. The server starts at the first call, with
    the imports of ``workload``, if it isn't started already.

    Raises:
        LaunchError: a rank failed or the time is up.
    """
    server = start(workload)
    with prepared_call(function, arguments, processes) as (call, results, environments):
        pairs = zip(results, environments, strict=True)
        started = fork(server, _rank, [(call, result, environment, log) for result, environment in pairs])
        return collect(started, results, timeout)


def _rank(call: Path, result: Path, environment: dict[str, str], log: Path) -> None:
    import torch

    from shardkit import _worker

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    _worker.main(call, result)
