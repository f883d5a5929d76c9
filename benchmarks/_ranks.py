"""What a rank does for a benchmark. Each trial has fresh ranks, two of them, over gloo."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from _loops import LIBRARIES, Arm, Window, built, ready
from _measure import interleave
from _memory import fix_allocator, peak, start_peak
from _workloads import WORKLOADS

from shardkit.bench import _budget
from shardkit.bench._search import Search
from shardkit.errors import LaunchError
from shardkit.testing import preload, run

# By the server that forks ranks, so that an import counts for no arm and takes no time.
preload(*LIBRARIES)

STEPS = 3
"""Steps of a trial for memory: the state of the optimizer is there from the second on."""


MOST = 2**12
"""The largest batch that is looked for."""

_LOST = re.compile(r"Connection (?:closed|reset)|Broken pipe")
"""What is in the error of a rank that lost another."""

Peak = tuple[int, float]
"""The most bytes that a rank held above what it held before its model, and the seconds of the trial."""


def measure_peaks(arms: tuple[Arm, ...], workload: str, batch: int, *, repeats: int) -> dict[str, list[Peak]]:
    """Return what the fuller of two ranks held in each trial: one of each arm, one after the other, again and again."""
    peaks: dict[str, list[Peak]] = {arm.name: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            peaks[arm.name].append(max(run(_trial, arm, workload, batch, processes=2, timeout=600)))
    return peaks


def largest_batch(
    arm: Arm, workload: str, budget: int, *, estimate: Callable[[int], float] | None = None, first: int | None = None
) -> tuple[int, int]:
    """Return the largest batch with which the arm trains within a budget, 0 if none, and the trials that it took.

    It was tried, and so was one more, which failed. ``estimate``, about how many bytes a batch takes, and ``first``,
    the batch to try first, save trials and change no answer.
    """
    search = Search(range(1, MOST), budget, estimate)
    trials = 0
    batch = first or search.next()
    while batch is not None:
        trials += 1
        reserved = _reserved(arm, workload, batch, budget)
        if reserved is None:
            search.failed(batch)
        else:
            search.fitted(batch, reserved)
        batch = search.next()
    return search.largest or 0, trials


def _reserved(arm: Arm, workload: str, batch: int, budget: int) -> int | None:
    """Return the most that a rank reserved, None if memory was short."""
    try:
        told = run(_within, arm, workload, batch, budget, processes=2, timeout=600)
    except LaunchError as error:
        # Some libraries don't look whether they got what they asked for, or can't say so.
        if re.search(r"ended by SIG(?:ABRT|SEGV|BUS)|bad_alloc", str(error)):
            return None
        raise
    if "short" in told:
        return None
    if "lost" in told:
        raise RuntimeError(f"batch {batch} of {arm.name}: a rank lost the other, and memory was short on neither")
    return max(reserved for reserved in told if isinstance(reserved, int))


def measure_blocks(
    arms: list[Arm],
    workload: str,
    batch: int | Mapping[str, int],
    *,
    blocks: int,
    length: int,
    processor: bool = False,
) -> dict[str, list[float]]:
    """Return seconds per step of each arm in each round, on two ranks that start and end each block together.

    Those of the clock on the wall, or of the processor, all threads of rank 0 together.
    """
    return run(_blocks, arms, workload, batch, blocks, length, processor, processes=2, timeout=1800)[0]


def _trial(arm: Arm, workload: str, batch: int) -> Peak:
    fix_allocator()
    dist.init_process_group("gloo")
    _warm_up()
    base = start_peak()
    start = time.perf_counter()
    made = WORKLOADS[workload]()
    step = built(arm, made, Window())
    batches = made.batches(batch)
    for _ in range(STEPS):
        step(next(batches))
    return peak() - base, time.perf_counter() - start


def _within(arm: Arm, workload: str, batch: int, budget: int) -> int | Literal["short", "lost"]:
    """Return the most that this rank reserved, or that memory was short, or the other rank gone."""
    _budget.fix_allocator()
    dist.init_process_group("gloo")
    _warm_up(arm)
    memory = _budget.memory(torch.device("cpu"))
    memory.limit(budget)
    try:
        made = WORKLOADS[workload]()
        step = built(arm, made, Window())
        batches = made.batches(batch)
        for _ in range(STEPS):
            step(next(batches))
        memory.lift()
        # A rank that ends may take from the other what it has yet to receive.
        dist.barrier()
    except Exception as error:
        memory.lift()
        if _budget.refused_bytes(error, memory.reserved(), budget) is not None:
            return "short"
        # The other rank waits in a collective of which this one is no part: it ends when this one does.
        if _LOST.search(str(error)):
            return "lost"
        raise
    return memory.reserved()


def _blocks(
    arms: list[Arm], workload: str, batch: int | Mapping[str, int], blocks: int, length: int, processor: bool
) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    steps, before = ready(arms, WORKLOADS[workload], Window(), batch)
    clock = time.process_time if processor else time.perf_counter
    return interleave(steps, blocks=blocks, length=length, before=before, barrier=dist.barrier, clock=clock)


def _warm_up(arm: Arm | None = None) -> None:
    """Load what every arm loads once, such as the code of the kernels, or what this arm does, so that it counts not."""
    made = WORKLOADS["t5-tiny"]()
    batch = next(made.batches(1))
    if arm is not None:
        step = built(arm, made, Window())
    for _ in range(2):
        if arm is None:
            made.loss(made.model, batch).backward()
        else:
            step(batch)
    if arm is not None:
        # As in a program: one session at a time. The stacks of its threads go to those of the next.
        getattr(step, "close", bool)()
