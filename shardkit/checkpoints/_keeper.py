"""The checkpoints of one session: saved at once or in the background, and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, final

from shardkit._processes import same_everywhere
from shardkit.checkpoints import _directory
from shardkit.checkpoints._capture import capture
from shardkit.checkpoints._export import export_session
from shardkit.checkpoints._manifest import MANIFEST
from shardkit.checkpoints._read import Reader
from shardkit.checkpoints._restore import Restored, agreed, restore
from shardkit.checkpoints._write import Writer, together
from shardkit.errors import CheckpointError, DamageError, InputError

if TYPE_CHECKING:
    import torch

    from shardkit._processes import Agreeing
    from shardkit.checkpoints._training import Training


@final
class Keeper:
    """Saves and loads for a session. Collective, but for ``close``."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._locks: dict[str, _directory.Lock] = {}
        self._background: _Background | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of each parameter, by name."""
        return self._training.shapes

    def save(
        self,
        directory: str | Path,
        counters: Mapping[str, Any],
        windows: Mapping[str, Any] | None,
        objects: Mapping[str, Any] | None,
        state: Mapping[str, Any] | None,
        *,
        keep: int | None,
        wait: bool,
    ) -> Path:
        """Write a checkpoint, at once or in the background, and return its path."""
        training = self._training
        processes = training.processes
        processes.meet("save")
        agreed(training, self.finish)

        def call() -> dict[str, Any]:
            _check(_path(directory), keep)
            names = {"objects": _names("objects", objects), "state": _names("state", state)}
            _check_objects(objects or {})
            return {"directory": _place(directory), **names, "keep": keep, "wait": bool(wait)}

        self._same("save", call)
        root, step = Path(directory), counters["step"]
        path = together(processes, lambda: self._take(root, step) if processes.rank == 0 else root)[0]
        writer = Writer(capture(training, counters, windows, objects or {}, state or {}), processes.rank)
        if wait:
            writer.write(path, processes, keep)
        else:
            agreed(training, writer.copy)
            self._background = _Background(writer, path, processes.background(), keep)
        return path

    def load(
        self,
        directory: str | Path,
        objects: Mapping[str, Any] | None,
        begin: Callable[[], None],
        *,
        missing_ok: bool,
        position: bool,
    ) -> Restored | None:
        """Bring the session to where a checkpoint stands; None if there is none and that is fine.

        ``begin`` is called before anything changes.
        """
        training = self._training
        processes = training.processes
        processes.meet("load")
        agreed(training, self.finish)

        def call() -> dict[str, Any]:
            names = _names("objects", objects)
            told = {"directory": _place(directory), "objects": names}
            return {**told, "missing_ok": bool(missing_ok), "position": bool(position)}

        self._same("load", call)
        root = Path(directory)

        def find() -> Path | None:
            # As rank 0 sees it, should another job save at this moment.
            if processes.rank or (missing_ok and _directory.is_new(root)):
                return None
            return _directory.resolve(root)

        path = together(processes, find, "read")[0]
        if path is None:
            return None
        try:
            reader = agreed(training, lambda: Reader(path))
            with reader:
                return restore(training, reader, objects or {}, begin)
        except DamageError as error:
            if path == root:
                raise
            before = together(processes, lambda: None if processes.rank else _directory.before(path), "read")[0]
            if before is None:
                raise
            raise DamageError(
                f"{error}. The checkpoint before it is {str(before)!r}: to go on from there, load it by that path"
            ) from error

    def export(self, directory: str | Path, dtype: torch.dtype | None) -> None:
        """Write the weights as other programs read them."""
        self._training.processes.meet("export")
        self._same("export", lambda: {"directory": _place(directory), "dtype": str(dtype)})
        export_session(self._training, Path(directory), dtype)

    def finish(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: it couldn't be written, on every rank.
        """
        background, self._background = self._background, None
        if background is not None:
            background.finish()

    def close(self) -> None:
        """Let other sessions save where this one did. Not collective.

        A save in the background ends first, here and on the other ranks; what comes of it isn't told.
        """
        background, self._background = self._background, None
        if background is not None:
            background.join()
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _same(self, what: str, call: Callable[[], dict[str, Any]]) -> None:
        """Raise unless all ranks were called alike. Collective."""
        same_everywhere([{what: told} for told in together(self._training.processes, call, "read")])

    def _take(self, root: Path, step: int) -> Path:
        """Take a directory for this session, and return where the checkpoint of a step goes in it."""
        root.mkdir(parents=True, exist_ok=True)
        place = os.path.realpath(root)
        if place in self._locks and not self._locks[place].holds(root):
            self._locks.pop(place).close()
        if place not in self._locks:
            self._locks[place] = _directory.Lock(root)
        _directory.clean(root)
        return _directory.free_path(root, step)


@final
class _Background:
    """A checkpoint that a thread writes."""

    def __init__(self, writer: Writer, path: Path, processes: Agreeing, keep: int | None) -> None:
        self._failure: BaseException | None = None
        self._work = (writer, path, processes, keep)
        self._thread = Thread(target=self._run, name="shardkit-save")
        self._thread.start()

    def _run(self) -> None:
        writer, path, processes, keep = self._work
        try:
            writer.write(path, processes, keep)
        except BaseException as error:
            self._failure = error

    def join(self) -> None:
        self._thread.join()

    def finish(self) -> None:
        self._thread.join()
        if self._failure is None:
            return
        error = CheckpointError(f"the last save, in the background, failed: {self._failure}")
        raise error from self._failure


def _path(directory: Any) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise InputError(f"the directory is a path, not a {type(directory).__name__}") from None


def _place(directory: Any) -> str:
    # Not where links lead: hosts may mount one file system in several places, but give it one name.
    return os.path.abspath(_path(directory))


def _check(root: Path, keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise InputError(f"keep is how many checkpoints stay, from 1 on, or None for all, not {keep!r}")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"can't save to {str(root)!r}: it is a file, not a directory")
    if (root / MANIFEST).is_file():
        raise CheckpointError(f"{str(root)!r} is itself a checkpoint: save into the directory that holds it")


def _names(what: str, given: Any) -> list[str]:
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"{what} is a mapping by name, not a {type(given).__name__}")
    for name in given or ():
        if not isinstance(name, str):
            raise InputError(f"the names in {what} are strings, not {name!r}")
    return sorted(given or ())


def _check_objects(objects: Mapping[str, Any]) -> None:
    for name, held in objects.items():
        if not callable(getattr(held, "state_dict", None)):
            raise InputError(
                f"object {name!r} is a {type(held).__name__}, without state_dict: plain values go in state"
            )
