"""The strategies under test: all that the installed backends declare."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import shardkit


@dataclass(frozen=True)
class Arm:
    """A strategy that a backend declares; ``missing`` says why it can't run here, or is empty."""

    strategy: str
    shards: frozenset[str]
    missing: str

    def __str__(self) -> str:
        return self.strategy


def declared() -> Iterator[Arm]:
    """Return all variants of all backends, whether their library is installed or not."""
    for backend in shardkit.backends().values():
        missing = ""
        if backend.library is not None and importlib.util.find_spec(backend.library) is None:
            missing = f"{backend.library} is not installed: {backend.install}"
        for variant in backend.variants_on("cpu"):
            yield Arm(variant.strategy, variant.shards, missing)
