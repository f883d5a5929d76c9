"""The ranks of a comparison: fresh processes, forked from a server that has imported torch and the workload once."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

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
        started: list[_Forked] = []
        try:
            for result, environment in zip(results, environments, strict=True):
                started.append(
                    _Forked(server.Process(target=_rank, args=(call, result, environment, log), daemon=True))
                )
        except BaseException:
            for process in started:
                process.kill()
            raise
        return collect(started, results, timeout)


class _Forked:
    """A forked rank, in the words of ``subprocess.Popen``."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _rank(call: Path, result: Path, environment: dict[str, str], log: Path) -> None:
    import torch

    from shardkit import _worker

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    _worker.main(call, result)
