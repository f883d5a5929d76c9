"""Runs in which a read that comes before its collective has ended doesn't stay unseen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from shardkit import testing

from .cells import Cell, Trace
from .ranks import train

CELL = Cell("gpt2_tiny", "sgd", accumulate=1, clipped=False)
STEPS = 4
LAUNCHES = 6
SESSIONS = 2
RANKS = 2


def runs(strategy: str) -> list[list[Trace]]:
    """Train the same LAUNCHES x SESSIONS times, in fresh processes each launch; return each run's ranks."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with ThreadPoolExecutor(min(2, len(cores))) as pool:
        launches = pool.map(lambda index: _launch(strategy, cores[index % len(cores)]), range(LAUNCHES))
        return [list(ranks) for launch in launches for ranks in zip(*launch, strict=True)]


def _launch(strategy: str, core: int) -> Sequence[list[Trace]]:
    return testing.run(_train_starved, strategy, core, processes=RANKS, timeout=180)


def _train_starved(strategy: str, core: int) -> list[Trace]:
    # Memory that nothing was written to holds NaN, not by luck the values of the last step.
    torch.use_deterministic_algorithms(True)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    return [train(strategy, CELL, steps=STEPS, watch=False, evaluate=True, opened=_starve) for _ in range(SESSIONS)]


def _starve() -> None:
    """Let the threads that carry out collectives run only while nobody else wants the core (Linux)."""
    for task in Path("/proc/self/task").glob("*"):
        if "pt_gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
