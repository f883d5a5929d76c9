"""A hard limit on what one rank may allocate, and what its allocations came to."""

from __future__ import annotations

import ctypes
import errno
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from shardkit._sizes import format_bytes
from shardkit.errors import InputError, UnsupportedError

_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
_THRESHOLD = 128 * 1024
_STACK = 2**20
_ATTRIBUTES = 256
"""Bytes in which glibc's pthread_attr_t finds room on any processor: it is 64 on the largest."""

_PADDING = 128 * 1024 + 2 * 4096
"""What glibc asks the kernel for on top of a block: its heap grows by so much more (M_TOP_PAD), in whole pages."""

_STACK = 2**20
"""Bytes of a thread's stack. The system's 8 MiB are reserved and hardly touched, and gloo starts three threads a
group."""

_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes")
"""The text of torch's allocator on the CPU (c10/core/impl/alloc_cpu.cpp)."""

_NEAR = re.compile(
    r"std::bad_alloc|could not (?:create|execute) a primitive|Cannot allocate memory|Resource temporarily unavailable"
    r"|can't start new thread|NCCL.*unhandled cuda error|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|CUDA error: out of memory"
)
"""What libraries say that were refused memory, of which they don't tell how much."""


def fix_allocator() -> None:
    """Have glibc give freed blocks of 128 KiB and more back to the kernel at once, use one arena, and small stacks.

    Left to itself it raises the threshold as a program runs, so that what fits would depend on how its heap came to be
    fragmented, which differs from run to run. A thread that is started from now on has a stack of 1 MiB: of 8 MiB, the
    usual size, it touches next to nothing, but a limit on data counts all. Elsewhere than with glibc it does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and sys.platform == "linux":
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        libc.mallopt(_M_ARENA_MAX, 1)
        if hasattr(libc, "pthread_setattr_default_np"):
            attributes = ctypes.create_string_buffer(_ATTRIBUTES)
            libc.pthread_getattr_default_np(attributes)
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK))
            libc.pthread_setattr_default_np(attributes)
            libc.pthread_attr_destroy(attributes)


def check_supported(kind: str) -> None:
    """Raise unless a limit can be set on this kind of device.

    Raises:
        UnsupportedError: on the CPU of another system than Linux with glibc, or on an accelerator that isn't CUDA.
    """
    if kind == "cpu":
        if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
            raise UnsupportedError(
                "a budget of memory on the CPU needs Linux with glibc, where the kernel holds a process to it "
                "(RLIMIT_DATA) and the allocator's threshold can be fixed; elsewhere there is none that holds"
            )
    elif kind != "cuda":
        raise UnsupportedError(f"a budget of memory can be held to on cpu and cuda, not on {kind}")


class Memory(Protocol):
    """The memory of this rank, counted from when this was made. All in bytes."""

    base: int
    """What the rank held before."""

    def limit(self, budget: int) -> None:
        """Have allocations beyond the budget fail, from now on."""

    def lift(self) -> None:
        """Let allocations be, as they were before the limit."""

    def peak(self) -> int:
        """Return the most that was held at a time."""

    def reserved(self) -> int:
        """Return the most that was reserved at a time, which is what the limit holds for."""

    def held(self) -> int:
        """Return what is held now."""

    def in_use(self) -> int:
        """Return what the allocator has given out now, of which nothing depends on how it keeps what is free."""


def memory(device: torch.device) -> Memory:
    """Return the memory of this rank on its device; gives freed memory back first."""
    gc.collect()
    return _Host() if device.type == "cpu" else _Device(device)


class _Host:
    """Of the process, by the kernel's count: Linux."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = _status()
        self.base = status["VmHWM"]
        self._size = status["VmSize"]
        self._data = status["VmData"]
        self._start = _anonymous(status)
        self._files = status.get("RssFile", 0)
        self._before: tuple[int, int] | None = None
        self._mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo

    def limit(self, budget: int) -> None:
        import resource

        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = self._data + budget
        for present in (soft, hard):
            if present != resource.RLIM_INFINITY and present < wanted:
                raise InputError(
                    f"this process may hold {format_bytes(present)} of data (ulimit -d), which is below the budget of "
                    f"{format_bytes(budget)} and the {format_bytes(self._data)} that it holds before training"
                )
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))

    def lift(self) -> None:
        import resource

        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def peak(self) -> int:
        status = _status()
        # Pages of files come in as code is run, stay, and belong to no tensor; the limit doesn't count them either.
        code = max(0, status.get("RssFile", 0) - self._files)
        return max(0, status["VmHWM"] - self.base - code)

    def reserved(self) -> int:
        # The kernel keeps a peak of all address space only: that of the data is at most as high.
        return max(0, _status()["VmPeak"] - self._size)

    def held(self) -> int:
        return _anonymous(_status()) - self._start

    def in_use(self) -> int:
        if self._mallinfo is None:
            return self.held()
        told = self._mallinfo()
        return int(told.uordblks + told.hblkhd)


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its heap (malloc.h); given out are ``uordblks``, and ``hblkhd`` by mmap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class _Device:
    """Of a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._module.synchronize(device)
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(device)
        self.base = int(self._module.memory_allocated(device))
        self._reserved = int(self._module.memory_reserved(device))

    def limit(self, budget: int) -> None:
        free, total = self._module.mem_get_info(self._device)
        if budget > free:
            raise InputError(
                f"the budget of {format_bytes(budget)} is more than the {format_bytes(free)} of {format_bytes(total)} "
                f"that are free on {self._device} before training"
            )
        self._module.set_per_process_memory_fraction((self._reserved + budget) / total, self._device)

    def lift(self) -> None:
        self._module.set_per_process_memory_fraction(1.0, self._device)

    def peak(self) -> int:
        return int(self._module.max_memory_allocated(self._device)) - self.base

    def reserved(self) -> int:
        return int(self._module.max_memory_reserved(self._device)) - self._reserved

    def held(self) -> int:
        return int(self._module.memory_allocated(self._device)) - self.base

    def in_use(self) -> int:
        return self.held()


def refused_bytes(error: BaseException, reserved: int, budget: int | None) -> int | None:
    """Return how many bytes could not be allocated, 0 if it isn't said, None if the error isn't for want of memory.

    ``reserved`` is the most that was, and ``budget`` the limit, or None for that of the machine. The error may be the
    cause of this one, or what was handled when it was raised. A text that claims it is believed only if the numbers
    agree, since a program may raise anything.
    """
    left = (budget if budget is not None else _available() + reserved) - reserved
    found = [asked for one in _chain(error) if (asked := _refused(one, left, reserved)) is not None]
    return max(found, default=None)


def _refused(error: BaseException, left: int, reserved: int) -> int | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _asked(text)
    if isinstance(error, MemoryError):
        return None if _is_raised_by_a_statement(error) else _asked(text)
    if isinstance(error, OSError):
        return 0 if error.errno == errno.ENOMEM else None
    if not isinstance(error, RuntimeError):
        return None
    told = _ALLOCATOR.search(text)
    if told is not None:
        # What was reserved at the failure may be free by now, so that it is the peak that counts.
        return int(told[1]) if int(told[1]) + _PADDING > left else None
    # A library may ask for as much at once as all that was there before.
    return 0 if _NEAR.search(text) and left <= reserved else None


def _is_raised_by_a_statement(error: BaseException) -> bool:
    """Return whether a program's own ``raise`` made this error, and not an allocation that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").startswith("raise")


def _asked(text: str) -> int:
    """Return the bytes that torch or NumPy says it couldn't allocate, 0 if it doesn't."""
    told = re.search(r"(?:[Tt]ried|[Uu]nable) to allocate ([\d.]+) (bytes|[KMGTPE]iB)", text)
    if told is None:
        return 0
    return int(float(told[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(told[2]))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its causes and what was handled when they were raised."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _available() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _anonymous(status: dict[str, int]) -> int:
    """Return what is resident but for pages of files, which come in as code is run, and belong to no tensor."""
    return status["VmRSS"] - status.get("RssFile", 0)


def _status() -> dict[str, int]:
    """Return what the kernel counts of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {pair[0].rstrip(":"): int(pair[1]) * 1024 for pair in pairs}
