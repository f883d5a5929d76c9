"""How a checkpoint is written: each rank its share of every file, then one rename makes it visible."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor

from shardkit.checkpoints import _directory
from shardkit.checkpoints._contents import Contents, Held
from shardkit.checkpoints._disk import reserve, start_writing
from shardkit.checkpoints._layout import Layout, lay_out, memory_of
from shardkit.checkpoints._manifest import checksum, sealed
from shardkit.checkpoints._share import Part, divide
from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    from shardkit._processes import Agreeing

EXTENT = 2**23
"""Bytes under one checksum, at most."""

_AHEAD = 2**26
"""Bytes that are written before the disk is told to begin with them."""

T = TypeVar("T")
Extents = dict[str, dict[str, list[list[Any]]]]


@final
class Writer:
    """Writes this rank's share of a checkpoint. Every rank makes one of the same contents."""

    def __init__(self, contents: Contents, rank: int) -> None:
        self._manifest = contents.manifest
        self._rank = rank
        self._layouts: dict[str, Layout] = {}
        self._share: dict[str, list[Part]] = {}
        self._held = contents.files
        self._watch: Callable[[int, int], None] | None = None
        self._written = 0
        for file, specs in contents.specs.items():
            if not specs:
                continue
            self._layouts[file] = lay_out(specs, contents.manifest["metadata"].get(file, {}))
            sizes = {name: spec.numel for name, spec in specs.items()}
            widths = {name: spec.itemsize for name, spec in specs.items()}
            self._share[file] = divide(sizes, widths, [held.get(file, {}) for held in contents.held])[rank]

    def copy(self) -> None:
        """Copy what this rank will write into host memory, so that training can go on meanwhile."""
        copied: dict[str, dict[str, Held]] = {}
        for file, parts in self._share.items():
            for name, start, end in parts:
                held = self._held[file][name]
                own = copied.setdefault(file, {}).setdefault(name, Held(held.spec, []))
                elements = _elements(_flat(held, start, end), start, end)
                own.runs.append((start, elements.to("cpu", held.spec.dtype, copy=True)))
        self._held = copied

    def watch(self, watch: Callable[[int, int], None]) -> None:
        """Have a function called with how many bytes of this rank's share are written, and how many there are."""
        self._watch = watch

    def write(self, path: Path, processes: Agreeing, keep: int | None) -> None:
        """Write the checkpoint beside a path, and make it visible there. Collective.

        Raises:
            CheckpointError: it can't be written, on every rank; what was there before is as it was.
        """
        token = processes.agree(secrets.token_hex(4))[0]
        partial = path.parent / f"{_directory.PARTIAL}{token}"
        try:
            extents = self.write_files(partial, processes)
            together(processes, lambda: self._publish(partial, path, extents, keep) if self._rank == 0 else None)
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def write_files(self, partial: Path, processes: Agreeing) -> list[Extents]:
        """Write all files into a new directory, and return by rank what was written, with checksums. Collective.

        Raises:
            CheckpointError: they can't be written, on every rank.
        """
        together(processes, lambda: self._begin(partial) if self._rank == 0 else None)
        return together(processes, lambda: self._write_share(partial))

    def _begin(self, partial: Path) -> None:
        needed = sum(layout.size for layout in self._layouts.values())
        free = _free(partial.parent)
        if free is not None and free < needed:
            raise CheckpointError(
                f"the disk of {str(partial.parent)!r} is too full: the checkpoint needs {needed} bytes, and {free} are "
                "free"
            )
        partial.mkdir()
        for file, layout in self._layouts.items():
            with _directory.naming(partial / file), (partial / file).open("wb") as opened:
                opened.write(layout.header)
                opened.flush()
                reserve(opened.fileno(), layout.size)

    def _write_share(self, partial: Path) -> Extents:
        if not partial.is_dir():
            raise CheckpointError(
                f"{str(partial.parent)!r} isn't one directory for all ranks: rank 0 writes there, and this rank "
                "doesn't see it; save to a file system that all ranks share"
            )
        extents: Extents = {}
        files = list(self._layouts)
        # Each rank begins with another file: a file system lets one process at a time write into a file.
        turn = self._rank % len(files)
        descriptors: dict[str, int] = {}
        with ExitStack() as closing:
            for file in files[turn:] + files[:turn]:
                # Rank 0 has written the headers, too.
                if self._share[file] or self._rank == 0:
                    with _directory.naming(partial / file):
                        descriptors[file] = os.open(partial / file, os.O_WRONLY)
                        closing.callback(os.close, descriptors[file])
                        extents[file] = self._write_parts(descriptors[file], file)
            for file, descriptor in descriptors.items():
                with _directory.naming(partial / file):
                    os.fsync(descriptor)
        return extents

    def _write_parts(self, descriptor: int, file: str) -> dict[str, list[list[Any]]]:
        extents: dict[str, list[list[Any]]] = {}
        layout, waiting = self._layouts[file], 0
        for name, start, end in self._share[file]:
            held, width = self._held[file][name], layout.specs[name].itemsize
            run = _flat(held, start, end)
            step = max(EXTENT // width, 1)
            for first in range(start, end, step):
                last = min(first + step, end)
                # A name for it: the memory is the tensor's.
                elements = _elements(run, first, last).to("cpu", layout.specs[name].dtype).contiguous()
                data = memory_of(elements)
                write_at(descriptor, data, layout.places[name] + first * width)
                extents.setdefault(name, []).append([first * width, len(data), checksum(data)])
                if self._watch is not None:
                    self._written += len(data)
                    self._watch(self._written, self._size())
                waiting += len(data)
                if waiting >= _AHEAD:
                    start_writing(descriptor)
                    waiting = 0
        return extents

    def _size(self) -> int:
        return sum(
            (end - start) * self._layouts[file].specs[name].itemsize
            for file, parts in self._share.items()
            for name, start, end in parts
        )

    def _publish(self, partial: Path, path: Path, extents: list[Extents], keep: int | None) -> None:
        files = {}
        for file, layout in self._layouts.items():
            joined: dict[str, list[list[Any]]] = {}
            for rank in extents:
                for name, found in rank.get(file, {}).items():
                    joined.setdefault(name, []).extend(found)
            files[file] = {
                "size": layout.size,
                "header": checksum(layout.header),
                "complex": [name for name, spec in layout.specs.items() if spec.dtype is torch.complex128],
                "extents": {name: sorted(found) for name, found in joined.items()},
            }
        manifest: dict[str, Any] = {"number": _directory.next_number(path.parent)}
        manifest |= {key: value for key, value in self._manifest.items() if key != "metadata"}
        manifest["saved"] = datetime.now(UTC).isoformat(timespec="seconds")
        manifest["files"] = files
        _directory.publish(partial, path, sealed(manifest), keep)


def together(processes: Agreeing, action: Callable[[], T], verb: str = "write") -> list[T]:
    """Do something on every rank and return what each got; if it fails on one, raise on all. Collective.

    Raises:
        CheckpointError: it failed on a rank; with the file that the operating system couldn't ``verb``.
    """
    result, failure = None, None
    try:
        result = action()
    except OSError as error:
        named = "" if error.filename is None else f" {error.filename!r}"
        failure = CheckpointError(f"can't {verb}{named}: {error.strerror or error}")
        failure.__cause__ = error
    except Exception as error:
        failure = error  # type: ignore[assignment]
    return processes.agree(result, failure)


def _flat(held: Held, start: int, end: int) -> tuple[int, Tensor]:
    """Return the run that holds these elements: its first, and all of them along one dimension."""
    for first, values in held.runs:
        if first <= start and end <= first + values.numel():
            return first, values.detach().resolve_conj().resolve_neg().reshape(-1)
    raise CheckpointError(f"elements {start} to {end} aren't held here, though they were")


def _elements(run: tuple[int, Tensor], start: int, end: int) -> Tensor:
    first, values = run
    return values[start - first : end - first]


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it at a place in a file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _free(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
