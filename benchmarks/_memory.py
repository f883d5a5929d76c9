"""The peak of a process's memory, as the kernel counts it, and processes to take it in. Linux with glibc."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3
_THRESHOLD = 128 * 1024


def fix_allocator() -> None:
    """Have freed blocks of 128 KiB and more go back to the kernel at once.

    Glibc raises the threshold as a program runs, so that a peak would show how its heap came to be fragmented, which
    differs from run to run, and not what is held.
    """
    if not ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD):
        raise OSError("mallopt refuses to fix the threshold of mmap")


def start_peak() -> int:
    """Forget the peak so far, and return what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak() -> int:
    """Return the most that was resident at a time since :func:`start_peak`, in bytes."""
    return _status("VmHWM")


def forked(function: Callable[..., T], *arguments: object) -> T:
    """Return what the function returns in a fork of this process, which must have no threads.

    Raises:
        RuntimeError: it raised there; shows the traceback.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # Not to outlive a rank that is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _answer(writer, function, arguments)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"a trial ended with status {status} and said nothing")
    value, error = pickle.loads(answer)
    if error:
        raise RuntimeError(f"a trial failed:\n{error}")
    return value  # type: ignore[no-any-return]


def _answer(writer: int, function: Callable[..., T], arguments: tuple[object, ...]) -> None:
    try:
        answer = pickle.dumps((function(*arguments), ""))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(answer)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    value = next(line for line in lines if line.startswith(f"{field}:"))
    return int(value.split()[1]) * 1024
