"""One timed run, as one of its ranks runs it: a workload trained and evaluated under a strategy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from shardkit._prepare import prepare
from shardkit._session import Session
from shardkit._strategy import Strategy
from shardkit.errors import ShardkitError
from shardkit.tools._trial import Refusal, rank_device, to_device
from shardkit.workloads import Workload, _find

WARM_UP_STEPS = 2
"""Steps that aren't timed: the first allocate buffers and optimizer states."""

LOSS_BATCHES = 3
"""How many batches are timed where the evaluation is the loss; one more goes before them."""

LARGEST_GENERATED = 8
"""The most samples of a batch that answers are generated for: a beam search holds several of each."""


@dataclass(frozen=True)
class Timed:
    """What all ranks of a timed run do. ``evaluate`` is whether it evaluates too.

    There is no budget: the limit, and on the CPU the allocator that goes with it, would cost time.
    """

    workload: str | Callable[[], Workload]
    strategy: Strategy
    batch: int
    steps: int
    evaluate: bool
    device: str
    progress: Path


@dataclass(frozen=True)
class Times:
    """What one rank took: seconds of each step after the warm-up, and of each evaluated batch of ``evaluated`` samples.

    ``tokens`` is of a micro-batch, None where the workload doesn't say. ``evaluation_error`` is why it isn't evaluated.
    """

    steps: list[float]
    tokens: int | None = None
    evaluations: list[float] = field(default_factory=list)
    evaluated: int = 0
    evaluation_error: str = ""


def run(task: Timed) -> Times | Refusal:
    """Train and evaluate on this rank."""
    device = rank_device(task.device)
    try:
        make = task.workload if callable(task.workload) else _find.function(task.workload)
        workload = make()
        model = workload.model.to(device).train()
        with prepare(model, workload.optimizer, task.strategy) as session:
            steps, tokens = _train(task, workload, session, device)
            if not task.evaluate:
                return Times(steps, tokens)
            seconds, samples, error = _evaluate(task, workload, session, device)
            return Times(steps, tokens, seconds, samples, error)
    except ShardkitError as refusal:
        return Refusal(type(refusal).__name__, str(refusal))


def _train(task: Timed, workload: Workload, session: Session, device: torch.device) -> tuple[list[float], int | None]:
    """Return the seconds of each step after the warm-up, without the making of batches, and a batch's tokens."""
    batches = islice(workload.batches(task.batch), session.rank, None, session.world_size)
    seconds: list[float] = []
    tokens = None
    for step in range(WARM_UP_STEPS + task.steps):
        drawn = [to_device(batch, device) for batch in islice(batches, task.strategy.accumulate)]
        if tokens is None and workload.tokens is not None:
            tokens = int(workload.tokens(drawn[0]))
        start = _now(device)
        for batch in drawn:
            session.backward(workload.loss(session.model, batch))
            session.step()
        if step >= WARM_UP_STEPS:
            seconds.append(_now(device) - start)
        _tell(task)
    return seconds, tokens


def _evaluate(task: Timed, workload: Workload, session: Session, device: torch.device) -> tuple[list[float], int, str]:
    """Return the seconds of each batch, how many samples it has, and what went wrong."""
    generate = workload.generate
    size = task.batch if generate is None else min(task.batch, LARGEST_GENERATED)
    batches: Any = islice(workload.batches(size), session.rank, None, session.world_size)
    seconds: list[float] = []
    with session.evaluate() as model:
        # No call communicates in here, so that an error of one rank leaves no other waiting.
        try:
            for place in range(1 if generate is not None else 1 + LOSS_BATCHES):
                batch = to_device(next(batches), device)
                start = _now(device)
                if generate is not None:
                    generate(model, batch)
                else:
                    workload.loss(model, batch)
                # Of a generation, which calls the model often, the first call weighs little.
                if generate is not None or place:
                    seconds.append(_now(device) - start)
        except Exception as error:
            return [], size, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    _tell(task)
    return seconds, size, ""


def _tell(task: Timed) -> None:
    if int(os.environ["RANK"]) == 0:
        with task.progress.open("ab") as file:
            file.write(b".")


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
