"""Several processes from one Python program, for notebooks and tests; jobs start with torchrun."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cloudpickle
from torch.distributed import TCPStore

from shardkit.errors import LaunchError

T = TypeVar("T")

GRACE_SECONDS = 10
"""How long the other ranks have to end after one failed, before they are killed."""


def launch(function: Callable[..., T], *arguments: Any, processes: int = 2, timeout: float | None = None) -> list[T]:
    """Call ``function(*arguments)`` in new processes and return each rank's result, in order of rank.

    The processes find each other as under ``torchrun --nproc-per-node``; :func:`shardkit.prepare` joins them. The
    function may stand in a notebook. It is sent by value together with what it refers to in the main module, and so are
    its arguments and results. ``timeout`` is in seconds, for the whole call. A free port is found, unless the
    environment sets MASTER_PORT. Torch computes with one thread per process unless OMP_NUM_THREADS says otherwise.

    Raises:
        LaunchError: a rank failed, which ends the others, or the time is up; names the rank and shows its traceback.
    """
    with prepared_call(function, arguments, processes) as (call, results, environments):
        command = [sys.executable, "-m", "shardkit._worker", str(call)]
        started = [
            subprocess.Popen([*command, str(result)], env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
            for result, variables in zip(results, environments, strict=True)
        ]
        return collect(started, results, timeout)


class Process(Protocol):
    """What is needed of a running rank; ``subprocess.Popen`` is one."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@contextmanager
def prepared_call(
    function: Callable[..., Any], arguments: tuple[Any, ...], processes: int
) -> Iterator[tuple[Path, list[Path], list[dict[str, str]]]]:
    """Write a call to a file; give it, a result file for each rank, and each rank's environment variables."""
    if processes < 1:
        raise LaunchError(f"processes is at least 1, not {processes}")
    with tempfile.TemporaryDirectory(prefix="shardkit-launch-") as folder:
        call = Path(folder, "call.pickle")
        call.write_bytes(dump((function, arguments), "the function and its arguments"))
        results = [Path(folder, f"result-{rank}.pickle") for rank in range(processes)]
        # Held until the ranks have ended, so that the port can't be lost to another program.
        held = store()
        yield call, results, [environment(rank, processes, held.port) for rank in range(processes)]


def collect(started: Sequence[Process], results: list[Path], timeout: float | None) -> list[Any]:
    """Return each rank's result when all have ended; as soon as one fails, end the others and raise its error."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    try:
        while True:
            codes = [process.poll() for process in started]
            ended = [rank for rank, code in enumerate(codes) if code is not None]
            failed = [rank for rank in ended if codes[rank] or not results[rank].exists()]
            if failed:
                _end(started)
                raise _failure(failed[0], codes[failed[0]] or 0, results)
            if None not in codes:
                return [cloudpickle.loads(pickle.loads(path.read_bytes())["value"]) for path in results]
            if time.monotonic() > deadline:
                late = [rank for rank, code in enumerate(codes) if code is None]
                names = ", ".join(map(str, late))
                raise LaunchError(f"rank {names} of {len(started)} did not end within {timeout:g} s", late[0])
            time.sleep(0.02)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        while any(process.poll() is None for process in started):
            time.sleep(0.02)


def _end(started: Sequence[Process]) -> None:
    """Give the ranks that still run a moment to write why, then ask them to end, then kill them."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in started:
        while process.poll() is None and time.monotonic() < deadline - GRACE_SECONDS / 2:
            time.sleep(0.02)
        if process.poll() is None:
            process.terminate()
    for process in started:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()


def _failure(rank: int, code: int, results: list[Path]) -> LaunchError:
    """Return the error of the rank that failed first, as far as the ranks could write down why."""
    told = {other: pickle.loads(path.read_bytes()) for other, path in enumerate(results) if path.exists()}
    errors = {other: outcome for other, outcome in told.items() if "traceback" in outcome}
    if rank not in errors:
        # It died without a word, and what the others say is that they lost it.
        death = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return LaunchError(f"rank {rank} {death}, without a result or a traceback", rank, death)
    first = min(errors, key=lambda other: float(errors[other]["time"]))
    text = errors[first]["traceback"]
    return LaunchError(f"rank {first} failed:\n{text}", first, text)


def dump(value: Any, what: str) -> bytes:
    """Return a value pickled by value; ``what`` names it in the error if that can't be."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise LaunchError(f"{what} can't be sent to another process: {error}") from error


def store() -> TCPStore:
    """Return the store at which the ranks meet, held by this process so that its port can't be lost to another."""
    text = os.environ.get("MASTER_PORT", "0")
    if not (text.isdecimal() and int(text) < 2**16):
        raise LaunchError(f"MASTER_PORT is a port from 1 to 65535, or unset to have a free one found, not {text!r}")
    wanted = int(text)
    if wanted:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError as error:
                raise LaunchError(
                    f"port {wanted}, set by MASTER_PORT, is in use ({error.strerror}): set another, or unset it to "
                    "have a free one found"
                ) from None
    return TCPStore("127.0.0.1", wanted, None, is_master=True, wait_for_workers=False)


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank: those of torchrun, the number of threads, and where modules are."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is ours, as it is the agent's under torchrun: no rank shall open another.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "shardkit",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
