"""The peak of a process's memory, as the kernel counts it. Linux with glibc."""

from __future__ import annotations

import ctypes
from pathlib import Path

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


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    value = next(line for line in lines if line.startswith(f"{field}:"))
    return int(value.split()[1]) * 1024
