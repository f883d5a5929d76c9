"""What a checkpoint holds, before it is written: tensors by file and name, as far as this rank has them, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit.checkpoints._layout import DTYPES, Spec, memory_of
from shardkit.checkpoints._manifest import checksum
from shardkit.checkpoints._share import Run
from shardkit.checkpoints._values import encode
from shardkit.errors import CheckpointError

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.safetensors"
RANKS = "ranks.safetensors"


class Held(NamedTuple):
    """A tensor of a checkpoint, and the runs of its elements that this rank holds: the first element of each, and a
    tensor with them in order."""

    spec: Spec
    runs: list[tuple[int, Tensor]]

    def extent(self) -> list[Run]:
        return [(start, start + values.numel()) for start, values in self.runs]


@dataclass
class Contents:
    """What is to be written: the same names on every rank that holds part of a tensor."""

    manifest: dict[str, Any]
    """What is the same on every rank, but for ``ranks``, ``files`` and ``number``."""
    files: dict[str, dict[str, Held]] = field(default_factory=dict)
    specs: dict[str, dict[str, Spec]] = field(default_factory=dict)
    """All tensors of each file, also those of which this rank holds nothing."""
    held: list[dict[str, dict[str, list[Run]]]] = field(default_factory=list)
    """By rank, file and name: what each rank holds."""


def whole(tensor: Tensor) -> Held:
    """Return a tensor that this rank holds whole."""
    tensor = tensor.detach()
    return Held(Spec(tensor.dtype, tuple(tensor.shape)), [(0, tensor)])


def of_one_process(manifest: dict[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> Contents:
    """Return contents that one process holds whole."""
    held = {file: {name: whole(value) for name, value in tensors.items()} for file, tensors in files.items()}
    return Contents(
        manifest,
        held,
        {file: {name: one.spec for name, one in tensors.items()} for file, tensors in held.items()},
        [{file: {name: one.extent() for name, one in tensors.items()} for file, tensors in held.items()}],
    )


class Encoded(NamedTuple):
    """A value as JSON with its tensors, and a checksum of both."""

    value: Any
    tensors: dict[str, Tensor]
    digest: str


def encoded(value: Any, place: str) -> Encoded:
    """Return a value of the user's in the form in which it is written.

    Raises:
        CheckpointError: a checkpoint can't hold it.
    """
    tensors: dict[str, Tensor] = {}
    try:
        told = encode(value, place, tensors)
    except RecursionError:
        raise CheckpointError(f"{place} is nested too deeply, or holds itself") from None
    sums = [json.dumps(told, sort_keys=True)]
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or (tensor.dtype not in DTYPES and tensor.dtype is not torch.complex128):
            kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
            raise CheckpointError(f"{name} is a tensor of {kind}, which a checkpoint can't hold")
        plain = tensors[name] = tensor.detach().resolve_conj().resolve_neg()
        sums.append(f"{name} {plain.dtype} {tuple(plain.shape)} {checksum(memory_of(plain.cpu().contiguous()))}")
    return Encoded(told, tensors, checksum("\n".join(sums).encode()))
