"""A directory of checkpoints: which there are, how a new one becomes visible, which old ones go."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any, final

from shardkit.checkpoints._manifest import MANIFEST
from shardkit.errors import CheckpointError, StateError

PARTIAL = ".partial-"
_DISCARDED = ".discarded-"
_LOCK = ".lock"
_LAST = 2**62
_LOCK_SECONDS = 30
"""How long to wait for another job's lock: a job that was killed and started again may find its own for a while."""

_locked: set[tuple[int, int]] = set()
"""Device and inode of the lock files that sessions of this process hold."""


def checkpoints(directory: str | Path) -> list[Path]:
    """Return the whole checkpoints in a directory, in the order in which they were saved. Not collective."""
    root = Path(directory)
    found = []
    for path in root.glob("step-*"):
        number = _number(path)
        if number is not None:
            found.append((number, path.name, path))
    return [path for _, _, path in sorted(found)]


def latest(directory: str | Path) -> Path | None:
    """Return the checkpoint that was saved last in a directory; None if there is none. Not collective."""
    found = checkpoints(directory)
    return found[-1] if found else None


def resolve(directory: Path) -> Path:
    """Return the checkpoint that a path stands for: itself, or the last in it.

    Raises:
        CheckpointError: there is none.
    """
    if (directory / MANIFEST).is_file():
        return directory
    found = latest(directory)
    if found is not None:
        return found
    if not directory.exists():
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r}: it doesn't exist")
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r}: it is a file, not a directory")
    if any(directory.glob("rank-*-of-*.pt")):
        raise CheckpointError(
            f"{str(directory)!r} holds a checkpoint of format 1, one file a rank, which only the version of shardkit "
            "that wrote it can read"
        )
    if any(directory.glob(f"{PARTIAL}*")):
        raise CheckpointError(
            f"there is no checkpoint in {str(directory)!r}: it holds only one that was never finished"
        )
    raise CheckpointError(f"there is no checkpoint in {str(directory)!r}: it has no {MANIFEST} and no step-* with one")


def holds_one(directory: Path) -> bool:
    """Return whether there is a checkpoint at a path, or in it."""
    return (directory / MANIFEST).is_file() or latest(directory) is not None


@final
class Lock:
    """A directory's lock, held by one session at a time until it is closed or its process ends. Of rank 0."""

    def __init__(self, root: Path) -> None:
        """Take the lock.

        Raises:
            StateError: another session holds it.
            OSError: the directory can't be written.
        """
        self._descriptor: int | None = None
        path = root / _LOCK
        # Not opened while another session of this process has it: to close it again would free that one's lock.
        if path.exists() and _key(os.stat(path)) in _locked:
            raise StateError(
                f"another open session of this process saves to {str(root)!r}: close it first, or give each a "
                "directory of its own"
            )
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._key = _key(os.fstat(self._descriptor))
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(self._descriptor):
            if time.monotonic() > deadline:
                holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace") or "unknown"
                self.close()
                raise StateError(f"another job saves to {str(root)!r} ({holder}): give each job a directory of its own")
            time.sleep(0.2)
        _locked.add(self._key)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def close(self) -> None:
        """Let go of the lock."""
        if self._descriptor is not None:
            _locked.discard(self._key)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


def clean(root: Path) -> None:
    """Remove what jobs left that were killed while they saved."""
    for prefix in (PARTIAL, _DISCARDED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def next_number(root: Path) -> int:
    """Return the number of the checkpoint that comes next."""
    found = checkpoints(root)
    return 1 if not found else (_number(found[-1]) or 0) + 1


def free_path(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step goes: a path that isn't taken."""
    path = root / f"step-{step:08d}"
    again = 0
    while path.exists():
        again += 1
        path = root / f"step-{step:08d}.{again}"
    return path


def publish(partial: Path, path: Path, manifest: dict[str, Any], keep: int | None) -> None:
    """Make a checkpoint visible at a path, in one step, and remove the oldest but ``keep``."""
    root = path.parent
    with (partial / MANIFEST).open("wb") as file:
        file.write(json.dumps(manifest, separators=(",", ":")).encode())
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    partial.rename(path)
    _sync_directory(root)
    if keep is not None:
        for old in checkpoints(root)[:-keep]:
            # In one step too: nobody finds half of it.
            discarded = root / f"{_DISCARDED}{old.name}"
            shutil.rmtree(discarded, ignore_errors=True)
            old.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)


def _number(path: Path) -> int | None:
    """Return which save of its directory a checkpoint is; the last of all where its manifest can't be read."""
    try:
        with (path / MANIFEST).open("rb") as file:
            # It stands at the beginning: manifests of large models are long, and there may be many.
            found = re.match(rb'\{"format":\d+,"number":(\d+),', file.read(100))
    except OSError:
        return None
    # Of a damaged one it must be heard when the last is loaded.
    return _LAST if found is None else int(found[1])


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _try_lock(descriptor: int) -> bool:
    import fcntl

    try:
        # Not flock: children of the process, such as a loader's workers, would go on holding it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # A file system without locks.
        return True
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
