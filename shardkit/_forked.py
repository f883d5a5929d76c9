"""Ranks forked from a server that has imported the heavy libraries, for the tests and the tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext, ForkServerProcess


class Forked:
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


def fork(server: ForkServerContext, target: Callable[..., object], calls: Iterable[tuple[object, ...]]) -> list[Forked]:
    """Start one rank for each of these argument lists: all of them, or none."""
    started: list[Forked] = []
    try:
        for arguments in calls:
            started.append(Forked(server.Process(target=target, args=arguments, daemon=True)))
    except BaseException:
        for process in started:
            process.kill()
        raise
    return started
