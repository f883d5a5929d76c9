"""The safetensors file format, for files that several ranks write at once and read in parts.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor),
and the elements of all tensors one after another: https://huggingface.co/docs/safetensors. The safetensors library
writes whole tensors from one process; here each rank writes the elements that it holds at their places.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from shardkit.errors import CheckpointError, DamageError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What the format knows. complex128 goes as F64 with one more dimension, of 2."""

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


class Spec(NamedTuple):
    """What a tensor is, wherever its elements lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a file: ``places`` gives the first byte of each, counted from the file's beginning."""

    header: bytes
    specs: dict[str, Spec]
    places: dict[str, int]
    size: int


def lay_out(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> Layout:
    """Return the layout of a file of these tensors: wide elements first, so that all lie at multiples of their size.

    Raises:
        CheckpointError: the format doesn't know the dtype of a tensor.
    """
    ordered = sorted(specs, key=lambda name: -specs[name].itemsize)
    offsets, end = {}, 0
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name in ordered:
        spec = specs[name]
        dtype, shape = _written_as(name, spec)
        offsets[name] = end
        end += spec.numel * spec.itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    places = {name: len(header) + offset for name, offset in offsets.items()}
    return Layout(header, dict(specs), places, len(header) + end)


def read_layout(path: Path, complex_names: frozenset[str] = frozenset()) -> Layout:
    """Return the layout of a file; ``complex_names`` are those tensors that were complex128.

    Raises:
        DamageError: its header makes no sense.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > _LONGEST_HEADER:
            raise DamageError(f"{str(path)!r} is damaged: it has no header of a safetensors file")
        text = file.read(length)
    try:
        if len(text) < length:
            raise ValueError("it ends within its header")
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        known = {name: dtype for dtype, name in DTYPES.items()}
        specs, places, end = {}, {}, _LENGTH_BYTES + length
        for name, entry in entries.items():
            shape, dtype = tuple(entry["shape"]), known[entry["dtype"]]
            if name in complex_names:
                shape, dtype = shape[:-1], torch.complex128
            specs[name] = Spec(dtype, shape)
            places[name] = _LENGTH_BYTES + length + entry["data_offsets"][0]
            end = max(end, _LENGTH_BYTES + length + entry["data_offsets"][1])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"{str(path)!r} is damaged: its header can't be read ({error})") from error
    return Layout(start + text, specs, places, end)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, to read and write; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _written_as(name: str, spec: Spec) -> tuple[str, list[int]]:
    if spec.dtype is torch.complex128:
        return DTYPES[torch.float64], [*spec.shape, 2]
    if spec.dtype not in DTYPES:
        raise CheckpointError(f"{name!r} is of {spec.dtype}, which the safetensors format doesn't know")
    return DTYPES[spec.dtype], list(spec.shape)
