"""Real English text that every Python carries: CPython's language reference, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor


@cache
def manual() -> Tensor:
    """Return the text as one row of byte values. It is that of the running Python, so it differs between versions."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def passages(size: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield for ever ``size`` passages of ``length`` bytes from places that the generator draws."""
    text = manual()
    while True:
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        yield text[starts + torch.arange(length)]
