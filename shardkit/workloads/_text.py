"""Real English text that every Python carries: CPython's language reference, as bytes or as words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor


@cache
def manual() -> Tensor:
    """Return the text as one row of byte values. It is that of the running Python, so it differs between versions."""
    return torch.frombuffer(bytearray(_text().encode()), dtype=torch.uint8).long()


@cache
def words() -> Tensor:
    """Return the text as one row of numbers of words: 0 for the most frequent word or mark, 1 for the next, and so on.

    It is that of the running Python: some 114,000 words in Python 3.11, of which 4,200 differ.
    """
    found = re.findall(r"\w+|[^\w\s]", _text())
    counts = Counter(found)
    numbers = {word: place for place, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    return torch.tensor([numbers[word] for word in found])


def _text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def passages(size: int, length: int, generator: torch.Generator, text: Tensor | None = None) -> Iterator[Tensor]:
    """Yield for ever ``size`` passages of a text, the bytes of the manual unless given, from places that the generator
    draws."""
    text = manual() if text is None else text
    while True:
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        yield text[starts + torch.arange(length)]
