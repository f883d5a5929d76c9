"""How a checkpoint is read: each rank the elements that it needs, once their checksums are known to be right."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
        self._buffer = torch.empty(0, dtype=torch.uint8)
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
            if self._buffer.numel() < size:
                # Kept: to take it anew for each extent would cost more than to read into it.
                self._buffer = torch.empty(size, dtype=torch.uint8)
            data = memory_of(self._buffer)[:size]
            if size >= _LARGE:
                read_ahead(self._descriptors[file], start + _AHEAD, size)
            self._read(file, data, start)
            if checksum(data) != expected:
                raise DamageError(
                    f"{str(self.path / file)!r} is damaged: bytes {start} to {start + size} aren't those that were "
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
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
