"""What a workload promises: the same weights and batches at every call, batches without end and of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardkit.errors import InputError
from shardkit.workloads import Workload


def check_weights(make: Callable[[], Workload]) -> Workload:
    """Return a new workload; raise unless another call of the function gives the same weights.

    Raises:
        InputError: it doesn't.
    """
    first = {name: value.detach().clone() for name, value in make().model.named_parameters()}
    again = make()
    for name, value in again.model.named_parameters():
        if name not in first or not torch.equal(first[name], value):
            raise InputError(
                f"the workload's weights differ between two calls, first in {name!r}: seed the generator in the "
                "function that makes it, such as with torch.manual_seed(0)"
            )
    return again


def check_batches(workload: Workload, size: int, count: int) -> None:
    """Raise unless ``batches`` gives ``count`` batches of this size, of another size too, the same at every call.

    Raises:
        InputError: says which it doesn't.
    """
    for asked in (size, size + 1):
        check_size(next(_checked(workload.batches(asked), 1)), asked)
    runs = [_checked(workload.batches(size), count) for _ in range(2)]
    for place, (one, other) in enumerate(zip(*runs, strict=True)):
        if not _equal(one, other):
            raise InputError(
                f"batches({size}) of the workload gives another batch {place} when it is called again: make its "
                "generator within the function, with a fixed seed"
            )


def check_size(batch: Any, size: int) -> None:
    """Raise unless a batch has as many samples as it was asked for, as far as its tensors show it.

    Raises:
        InputError: it has another number.
    """
    sizes = first_dimensions(batch)
    if sizes and size not in sizes:
        raise InputError(
            f"batches({size}) of the workload yields {max(sizes)} samples: it ignores the size, or gives its tensors "
            "another first dimension than that of the samples"
        )


def _checked(batches: Iterable[Any], count: int) -> Iterator[Any]:
    if not isinstance(batches, Iterator):
        raise InputError(f"batches of the workload returns an iterator over batches, not a {type(batches).__name__}")
    given = 0
    for batch in islice(batches, count):
        given += 1
        yield batch
    if given < count:
        raise InputError(f"batches of the workload ends after {given} of {count} batches: it is endless")


def first_dimensions(batch: Any) -> set[int]:
    """Return the first dimensions of a batch's tensors."""
    return {len(tensor) for tensor in tensors(batch) if tensor.dim()}


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: one itself, or a nest of mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


def _equal(one: Any, other: Any) -> bool:
    pairs = list(tensors(one)), list(tensors(other))
    return len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))
