"""How long a model takes to evaluate: to write answers, or to compute its loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from shardkit._session import Session
from shardkit.tools._trial import to_device
from shardkit.workloads import Workload

LOSS_BATCHES = 3
"""How many batches are timed where the evaluation is the loss; one more goes before them."""

LARGEST_GENERATED = 8
"""The most samples of a batch that answers are generated for: a beam search holds several of each."""


@dataclass(frozen=True)
class Evaluation:
    """What one rank took: ``seconds`` of each batch of ``samples``. ``error`` is why there are none."""

    samples: int
    seconds: list[float] = field(default_factory=list)
    error: str = ""


def evaluate(
    workload: Workload, session: Session, batch: int, device: torch.device, tell: Callable[[], None]
) -> Evaluation:
    """Evaluate a bounded number of batches, with whole weights; calls ``tell`` after each. Collective.

    Where the workload generates it is one batch of at most LARGEST_GENERATED samples, else the loss of LOSS_BATCHES.
    """
    generate = workload.generate
    samples = batch if generate is None else min(batch, LARGEST_GENERATED)
    # The first isn't timed; of a generation, which calls the model often, the first call weighs little.
    unseen = 0 if generate is not None else 1
    count = 1 if generate is not None else unseen + LOSS_BATCHES
    batches: Any = islice(workload.batches(samples), session.rank, None, session.world_size)
    seconds = []
    with session.evaluate() as model:
        # No call communicates in here, so that the error of one rank leaves no other waiting.
        try:
            for _ in range(count):
                drawn = to_device(next(batches), device)
                start = now(device)
                if generate is not None:
                    generate(model, drawn)
                else:
                    workload.loss(model, drawn)
                seconds.append(now(device) - start)
                tell()
        except Exception as error:
            return Evaluation(samples, error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    return Evaluation(samples, seconds[unseen:])


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
