"""How a checkpoint is read: each rank the elements that it needs, once their checksums are known to be right."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from shardkit.checkpoints._disk import read_ahead
from shardkit.checkpoints._layout import Layout, Spec, memory_of, read_layout
from shardkit.checkpoints._manifest import checksum, read_manifest
from shardkit.checkpoints._share import Part
from shardkit.errors import DamageError

PIECE = 2**23
"""Bytes that are read at a time on the way to a tensor that isn't in host memory."""

_AHEAD = 2**25
"""Bytes that the disk is told to read before they are asked for, where that saves more than it costs."""
_LARGE = 2**20
_THREADS = 2


@final
class Reader:
    """The files of one checkpoint. Nothing of it is collective."""

    def __init__(self, path: Path) -> None:
        """Read the manifest and the headers, and check that no file was cut short.

        Raises:
            DamageError: a file is missing or damaged.
            CheckpointError: it is of another format.
        """
        self.path = path
        self._layouts: dict[str, Layout] = {}
        self._descriptors: dict[str, int] = {}
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS)
        self.manifest = read_manifest(path)
        try:
            for file, facts in self.manifest["files"].items():
                self._open(file, facts)
        except BaseException:
            self.close()
            raise

    def _open(self, file: str, facts: dict[str, Any]) -> None:
        path = self.path / file
        try:
            size = path.stat().st_size
            if size != facts["size"]:
                raise DamageError(f"{str(path)!r} is damaged: it has {size} bytes, and {facts['size']} were written")
            layout = read_layout(path, frozenset(facts["complex"]))
            self._descriptors[file] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamageError(f"can't read {str(path)!r}: {error.strerror}") from error
        if checksum(layout.header) != facts["header"]:
            raise DamageError(f"{str(path)!r} is damaged: the checksum of its header isn't that of what was written")
        self._layouts[file] = layout

    def specs(self, file: str) -> dict[str, Spec]:
        """Return what tensors a file holds."""
        return self._layouts[file].specs if file in self._layouts else {}

    def verify(self, file: str, parts: Iterable[Part]) -> None:
        """Check the checksums of all extents that these elements lie in.

        Raises:
            DamageError: the file is damaged.
        """
        for start, size, expected in self._extents(file, parts):
            self._read_checked(file, self._memory(size), start, expected)

    @torch.no_grad()
    def fetch(self, file: str, part: Part, destination: Tensor) -> None:
        """Read a run of elements into a new tensor of as many, and check their checksums on the way.

        Raises:
            DamageError: the file is damaged; what the tensor holds is of no use.
        """
        layout, target = self._layouts[file], destination.detach()
        spec, place = layout.specs[part.name], layout.places[part.name]
        first, last = place + part.start * spec.itemsize, place + part.end * spec.itemsize
        in_place = target.is_cpu and target.is_contiguous() and target.dtype is spec.dtype
        flat = target if in_place else torch.empty(part.end - part.start, dtype=spec.dtype)
        into = memory_of(flat) if flat.numel() else memoryview(b"")
        for start, size, expected in self._extents(file, [part]):
            end = start + size
            if first <= start and end <= last:
                self._read_checked(file, into[start - first : end - first], start, expected)
                continue
            # Other elements are under the checksum, too.
            data = self._memory(size)
            self._read_checked(file, data, start, expected)
            low, high = max(first, start), min(last, end)
            into[low - first : high - first] = data[low - start : high - start]
        if not in_place:
            target.copy_(flat.view(target.shape))

    def each(self, actions: Iterable[Callable[[], object]]) -> None:
        """Do things that read, a few at a time: while one waits for the disk, another copies.

        Raises:
            DamageError: one of them has found damage.
        """
        for _ in self._pool.map(lambda action: action(), actions):
            pass

    def _memory(self, size: int) -> memoryview:
        """Return this thread's memory for reading, which is kept: to take it anew costs more than to read into it."""
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8)
        return memory_of(buffer)[:size]

    def _read_checked(self, file: str, data: memoryview, start: int, expected: str) -> None:
        if len(data) >= _LARGE:
            read_ahead(self._descriptors[file], start + _AHEAD, len(data))
        self._read(file, data, start)
        if checksum(data) != expected:
            raise DamageError(
                f"{str(self.path / file)!r} is damaged: bytes {start} to {start + len(data)} aren't those that were "
                "written"
            )

    def verify_all(self, part: int = 0, parts: int = 1) -> Iterator[int]:
        """Check all extents, or every ``parts``-th from number ``part``; yield the bytes that were checked.

        Raises:
            DamageError: a file is damaged.
        """
        number = 0
        for file, layout in self._layouts.items():
            for name, spec in layout.specs.items():
                for whole in self.cut(file, Part(name, 0, spec.numel)):
                    if number % parts == part:
                        self.verify(file, [whole])
                        yield (whole.end - whole.start) * spec.itemsize
                    number += 1

    def cut(self, file: str, part: Part) -> list[Part]:
        """Return a run of elements cut at the extents of its checksums."""
        width = self._layouts[file].specs[part.name].itemsize
        found = []
        for first, size, _ in self.manifest["files"][file]["extents"].get(part.name, ()):
            start, end = max(first // width, part.start), min((first + size) // width, part.end)
            if start < end:
                found.append(Part(part.name, start, end))
        return found

    def _extents(self, file: str, parts: Iterable[Part]) -> Iterator[tuple[int, int, str]]:
        layout = self._layouts[file]
        for name, start, end in parts:
            width, place = layout.specs[name].itemsize, layout.places[name]
            covered = start * width
            for first, size, expected in self.manifest["files"][file]["extents"].get(name, ()):
                if first < end * width and first + size > start * width:
                    if first > covered:
                        break
                    covered = first + size
                    yield place + first, size, expected
            if covered < end * width:
                raise DamageError(f"{str(self.path)!r} is damaged: its manifest lacks checksums of {name!r}")

    def read(self, file: str, name: str) -> Tensor:
        """Return a whole tensor, on the CPU."""
        spec = self._layouts[file].specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        self.read_into(file, Part(name, 0, spec.numel), tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, file: str, part: Part, destination: Tensor) -> None:
        """Read a run of elements into a tensor of as many, of any layout, device and dtype."""
        layout = self._layouts[file]
        spec, destination = layout.specs[part.name], destination.detach()
        offset = layout.places[part.name] + part.start * spec.itemsize
        if part.start == part.end:
            return
        if destination.is_cpu and destination.is_contiguous() and destination.dtype is spec.dtype:
            self._read(file, memory_of(destination), offset)
            return
        contiguous = destination.is_contiguous()
        flat = destination.view(-1) if contiguous else torch.empty(destination.numel(), dtype=spec.dtype)
        step = max(PIECE // spec.itemsize, 1)
        for first in range(0, part.end - part.start, step):
            piece = torch.empty(min(step, part.end - part.start - first), dtype=spec.dtype)
            self._read(file, memory_of(piece), offset + first * spec.itemsize)
            flat.narrow(0, first, piece.numel()).copy_(piece)
        if not contiguous:
            destination.copy_(flat.view(destination.shape))

    def _read(self, file: str, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = os.preadv(self._descriptors[file], [data], offset)
            except OSError as error:
                raise DamageError(f"can't read {str(self.path / file)!r}: {error.strerror}") from error
            if count == 0:
                raise DamageError(f"{str(self.path / file)!r} is damaged: it ends at byte {offset}")
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Close the files."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
