"""What a rank holds of a model under a strategy, in bytes, beside what it declares to share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import shardkit
from shardkit.bench._budget import Memory, fix_allocator, memory

WIDTH, LAYERS = 512, 16

SLACK = 0.25
"""How much more than its share a rank may hold, in multiples of the model: two ranks that split nothing hold 0.5 more.

Buckets and scratch of the backends here come to at most 0.12 (2026-11, torch 2.13.0+cpu).
"""


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, over what it held before the model was there."""

    model: int
    """Of the whole parameters."""
    between: int
    """Held between two windows."""
    gradients: int
    """Held beside that after a window's last backward."""


def measured(strategy: str) -> Held:
    """Train a few steps of Adam on this rank, and return what it holds. Collective."""
    fix_allocator()
    # What is imported and made once for all sessions is no model's.
    _train(strategy, 8, 2)
    gc.collect()
    counted = memory(torch.device("cpu"))
    start = counted.in_use()
    size, between, end = _train(strategy, WIDTH, LAYERS, lambda: _settled(counted))
    return Held(size, between - start, end - between)


def _train(strategy: str, width: int, layers: int, count: Callable[[], int] = int) -> tuple[int, int, int]:
    """Train four steps; return the model's bytes, and what is counted before the last window and at its end."""
    x = torch.ones(1, width)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = sum(value.nbytes for value in model.parameters())
    with shardkit.prepare(model, optimizer, strategy) as session:
        for _ in range(3):
            session.backward(session.model(x).square().mean())
            session.step()
        between = count()
        session.backward(session.model(x).square().mean())
        end = count()
        session.step()
    return size, between, end


def _settled(counted: Memory) -> int:
    """Return what is held once threads that communicate have let go of what they sent."""
    held = []
    for _ in range(10):
        held.append(counted.in_use())
        time.sleep(0.02)
    return min(held)


def shares(shards: frozenset[str], world_size: int) -> tuple[float, float]:
    """Return what a rank may hold by what is declared to be split, in multiples of the model's size.

    Between two windows: the parameters and Adam's two moments; and of gradients after the last backward.
    """
    part = 1 / world_size
    parameters, gradients, optimizer = (
        part if what in shards else 1.0 for what in ("parameters", "gradients", "optimizer")
    )
    return parameters + 2 * optimizer, gradients
