"""What the system is told beforehand, so that large files go faster. Where it doesn't listen, only speed is lost."""

from __future__ import annotations

import ctypes
import errno
import os

_library = ctypes.CDLL(None, use_errno=True)
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of sync_file_range(2)."""


def reserve(descriptor: int, size: int) -> None:
    """Give a file its size, and take the room for it on the disk: to write there later is cheaper, and can't fail for
    want of room.

    Raises:
        OSError: the disk is full.
    """
    fallocate = getattr(_library, "fallocate", None)
    if fallocate is not None:
        if fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size)


def start_writing(descriptor: int) -> None:
    """Have the disk begin with what a file has in memory, and don't wait for it."""
    sync_file_range = getattr(_library, "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _START_WRITING)


def read_ahead(descriptor: int, start: int, size: int) -> None:
    """Have the disk begin to read what will be asked for."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
