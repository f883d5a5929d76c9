"""A directory of checkpoints: which there are, how a new one becomes visible, which old ones go."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from shardkit.checkpoints._manifest import MANIFEST, read_manifest
from shardkit.errors import CheckpointError, StateError

PARTIAL = ".partial-"
_DISCARDED = ".discarded-"
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")
"""What a save calls a checkpoint. One under another name, such as a copy that somebody keeps, is left alone."""
_LOCK = ".lock"
_LOCK_SECONDS = 30
"""How long to wait for another job's lock: a job that was killed and started again may find its own for a while."""

_locked: set[tuple[int, int]] = set()
"""Device and inode of the lock files that sessions of this process hold."""


def checkpoints(directory: str | Path) -> list[Path]:
    """Return the checkpoints in a directory, in the order in which they were saved. Not collective.

    Also those that are damaged: who loads the last one must hear of it.
    """
    return [path for _, path in _numbered(Path(directory))]


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a directory in order, each with its number."""
    known, unreadable = [], []
    for path in directory.glob("step-*"):
        if not _NAME.fullmatch(path.name) or not path.is_dir():
            continue
        number = _number(path)
        # One that has gone meanwhile is no damage.
        with suppress(FileNotFoundError):
            age = path.stat().st_mtime_ns
            if number is None:
                unreadable.append((age, path))
            else:
                known.append((number, age, path))
    found = [(number, 0, path.name, path) for number, _, path in known]
    for age, path in unreadable:
        # Its own number is lost: behind those that are no younger.
        number = max((other for other, born, _ in known if born <= age), default=0)
        found.append((number, age, path.name, path))
    return [(number, path) for number, _, _, path in sorted(found)]


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


def is_new(directory: Path) -> bool:
    """Return whether nothing was ever saved to a directory, or only what a kill left of a first save."""
    if not directory.is_dir():
        # The name of one checkpoint that isn't there is no place for a first one.
        return not directory.exists() and not _NAME.fullmatch(directory.name)
    return not ((directory / MANIFEST).is_file() or any(directory.glob("rank-*-of-*.pt")) or checkpoints(directory))


def before(path: Path) -> Path | None:
    """Return the last checkpoint of those before this one whose manifest can be read."""
    found = checkpoints(path.parent)
    earlier = found[: found.index(path)] if path in found else []
    return next((other for other in reversed(earlier) if _number(other) is not None), None)


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

    def holds(self, root: Path) -> bool:
        """Return whether this is the lock of a directory: not if it was removed meanwhile, and made anew."""
        try:
            return _key(os.stat(root / _LOCK)) == self._key
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the lock."""
        if self._descriptor is not None:
            _locked.discard(self._key)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


def clean(root: Path) -> None:
    """Remove what is left of saves that were killed, and of checkpoints that couldn't be removed. Needs the lock."""
    for prefix in (PARTIAL, _DISCARDED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def next_number(root: Path) -> int:
    """Return the number of the checkpoint that comes next."""
    return 1 + max((number for number, _ in _numbered(root)), default=0)


def free_path(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step goes: a path that isn't taken."""
    path = root / f"step-{step:08d}"
    again = 0
    while path.exists():
        again += 1
        path = root / f"step-{step:08d}.{again}"
    return path


def publish(partial: Path, path: Path, manifest: dict[str, Any], keep: int | None) -> None:
    """Make a checkpoint visible at a path, in one step, and remove the oldest but ``keep``.

    Raises:
        OSError: it can't be made visible.
        CheckpointError: it is visible, but an old one can't be removed.
    """
    root, file = path.parent, partial / MANIFEST
    with naming(file), file.open("wb") as opened:
        opened.write(json.dumps(manifest, separators=(",", ":")).encode())
        opened.flush()
        os.fsync(opened.fileno())
    sync_directory(partial)
    partial.rename(path)
    try:
        sync_directory(root)
    except OSError:
        # Who is told that it isn't saved shall not find it.
        path.rename(partial)
        raise
    if keep is not None:
        for old in checkpoints(root)[:-keep]:
            if old != path:
                _discard(old, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the operating system say which file it is about."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _discard(old: Path, saved: Path) -> None:
    discarded = old.parent / f"{_DISCARDED}{old.name}"
    shutil.rmtree(discarded, ignore_errors=True)
    try:
        # In one step too: nobody finds half of it.
        old.rename(discarded)
    except OSError as error:
        raise CheckpointError(
            f"{str(saved)!r} is saved, but {str(old)!r}, which is to go, can't be removed: {error.strerror}"
        ) from error
    shutil.rmtree(discarded, ignore_errors=True)


def _number(path: Path) -> int | None:
    """Return which save of its directory a checkpoint is; None if its manifest can't be read."""
    try:
        found = os.stat(path / MANIFEST)
    except OSError:
        return None
    return _read_number(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=10_000)
def _read_number(path: Path, *version: int) -> int | None:
    # Manifests of large models are long: each is read once, as long as it is the same file.
    try:
        return int(read_manifest(path)["number"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


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


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some file systems over a network have nothing to do there, and say so.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
