"""Runs in which a read that comes before its collective has ended doesn't stay unseen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed import ProcessGroup

from shardkit import testing
from shardkit.errors import LaunchError

from .cells import Cell, Trace
from .ranks import Failure, train

CELL = Cell("gpt2_tiny", "sgd", accumulate=1, clipped=False)
STEPS = 4
LAUNCHES = 6
RANKS = 2
ASYNCHRONOUS = ("all_gather_single", "allgather", "allreduce", "broadcast", "reduce", "reduce_scatter_single")


def runs(strategy: str) -> list[list[Trace] | Failure]:
    """Train the same again and again, in fresh processes each time; return each run's trace from every rank.

    Of each launch's two runs the first is left alone and the second has late collectives.
    """
    found: list[list[Trace] | Failure] = []
    for _ in range(LAUNCHES):
        try:
            launch = testing.run(train_twice, strategy, processes=RANKS, timeout=300)
        except LaunchError as error:
            found += [Failure(str(error))] * 2
        else:
            found += [list(ranks) for ranks in zip(*launch, strict=True)]
    return found


def train_twice(strategy: str) -> list[Trace]:
    alone = train(strategy, CELL, steps=STEPS, watch=False, evaluate=True)
    with late_collectives():
        return [alone, train(strategy, CELL, steps=STEPS, watch=False, evaluate=True)]


@contextmanager
def late_collectives() -> Iterator[None]:
    """Start each collective of Python code only when it is waited for, and fill memory with NaN until it is written.

    An asynchronous collective may end as late as that: a read before the wait finds what no luck with time can hide.
    """
    torch.use_deterministic_algorithms(True)
    with mock.patch.multiple(ProcessGroup, **{name: _late(getattr(ProcessGroup, name)) for name in ASYNCHRONOUS}):
        yield
    torch.use_deterministic_algorithms(False)


def _late(collective: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: _Late(functools.partial(collective, *arguments))


class _Late:
    """A handle whose collective starts when the handle is first looked at."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = functools.cache(start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._start(), name)
