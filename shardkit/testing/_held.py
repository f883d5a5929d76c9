"""What a rank holds of a model under a strategy, in bytes, beside what it declares to share."""

from __future__ import annotations

import gc
import os
import time
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


GROWTH = 128 * 2**10
"""Bytes by which what a rank holds may grow in a hundred steps: backends here grow by up to half of it, and a leak of a
few tensors in each step, or of 2 KiB, by more."""


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, over what it held before the model was there."""

    model: int
    """Of the whole parameters."""
    between: int
    """Held between two windows."""
    gradients: int
    """Held beside that after a window's last backward."""
    grown: int
    """Held more after another hundred steps, of a tiny model."""


def measured(strategy: str) -> Held:
    """Train a few steps of Adam on this rank, and return what it holds. Collective."""
    fix_allocator()
    # Torch keeps notes of the last 2,000 collectives, 5 KB each, which would look like a leak.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    # Before the other: what is imported and made once for all sessions is no model's.
    _, early, _, late = _train(strategy, 8, 2, more=100)
    gc.collect()
    start = memory(torch.device("cpu")).in_use()
    size, between, end, _ = _train(strategy, WIDTH, LAYERS, more=0)
    return Held(size, between - start, end - between, late - early)


def _train(strategy: str, width: int, layers: int, more: int) -> tuple[int, int, int, int]:
    """Train; return the model's bytes, and those in use after some steps, after another backward, and at the end."""
    counted = memory(torch.device("cpu"))
    x = torch.ones(1, width)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = sum(value.nbytes for value in model.parameters())
    with shardkit.prepare(model, optimizer, strategy) as session:

        def train(steps: int) -> int:
            for _ in range(steps):
                session.backward(session.model(x).square().mean())
                session.step()
            gc.collect()
            return _settled(counted)

        between = train(3)
        session.backward(session.model(x).square().mean())
        end = _settled(counted)
        session.step()
        return size, between, end, train(more)


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
