"""A pass on the CPU that holds in memory what it would on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within this context, dropout keeps a mask of bytes, as it does on a GPU; on the CPU it keeps one of floats.

    The function itself is replaced: a mode would be off where a checkpoint runs its part again.
    """
    before = torch.nn.functional.dropout
    torch.nn.functional.dropout = _dropout
    try:
        yield
    finally:
        torch.nn.functional.dropout = before


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
