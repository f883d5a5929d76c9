"""One trial of a comparison, as its ranks run it: a workload trained under a strategy, or in plain torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._prepare import prepare
from shardkit._random import seed_everything
from shardkit._strategy import Strategy
from shardkit.errors import InputError, ShardkitError
from shardkit.tools._memory import PeakMemory
from shardkit.workloads import Workload, _find
from shardkit.workloads._contract import check_batches, check_weights


@dataclass(frozen=True)
class Task:
    """What all trials of a comparison share. ``batch_size`` is that of one micro-batch of one rank."""

    workload: str
    steps: int
    processes: int
    batch_size: int
    accumulate: int
    max_grad_norm: float | None
    seed: int | None
    device: str
    progress: Path


@dataclass(frozen=True)
class Trial:
    """What one rank saw: per step the mean of its own losses and the seconds taken, and its peak memory in bytes."""

    losses: list[float]
    seconds: list[float]
    peak_memory: int
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Refusal:
    """An error of shardkit's, which comes back as a value: its message says all that there is to say."""

    error: str
    message: str


def train_reference(task: Task) -> Trial | Refusal:
    """Train in this one process, in plain torch, on every micro-batch of all ranks; checks the workload first."""
    try:
        make = _find.function(task.workload)
        windows = task.processes * task.accumulate
        scratch = check_weights(make)
        check_batches(scratch, task.batch_size, windows * min(task.steps, 4))
        _check_loss(scratch, task.batch_size)
        del scratch
        device = rank_device(task.device)
        memory = PeakMemory.start(device)
        workload = make()
        model, optimizer = workload.model.to(device).train(), workload.optimizer
    except ShardkitError as refusal:
        return Refusal(type(refusal).__name__, str(refusal))
    if task.seed is not None:
        seed_everything(task.seed)

    def learn(batch: Any, last: bool) -> Tensor:
        loss = workload.loss(model, batch)
        (loss / windows).backward()
        if last:
            if task.max_grad_norm is not None:
                # In float64: in float32 torch's norm of a large tensor on CPU is off by more than our tolerance.
                squares = [value.grad.double().square().sum() for value in model.parameters() if value.grad is not None]
                norm = torch.stack(squares).sum().sqrt().float()
                nn.utils.clip_grads_with_norm_(model.parameters(), task.max_grad_norm, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses, seconds = _train(task, workload.batches(task.batch_size), windows, learn, device)
    weights = {name: value.detach().cpu() for name, value in model.named_parameters()}
    return Trial(losses, seconds, memory.read(), weights)


def train_strategy(task: Task, strategy: Strategy) -> Trial | Refusal:
    """Train this rank's part under a strategy. The weights come back from rank 0 only."""
    device = rank_device(task.device)
    try:
        make = _find.function(task.workload)
        make()
        warm_up(strategy, device)
        memory = PeakMemory.start(device)
        workload = make()
        model = workload.model.to(device).train()
        with prepare(model, workload.optimizer, strategy) as session:
            batches = islice(workload.batches(task.batch_size), session.rank, None, session.world_size)

            def learn(batch: Any, last: bool) -> Tensor:
                loss = workload.loss(session.model, batch)
                session.backward(loss)
                session.step()
                return loss.detach()

            losses, seconds = _train(task, batches, task.accumulate, learn, device)
            peak = memory.read()
            weights = session.full_weights()
            return Trial(losses, seconds, peak, weights if session.rank == 0 else {})
    except ShardkitError as refusal:
        return Refusal(type(refusal).__name__, str(refusal))


def _train(
    task: Task, batches: Iterator[Any], window: int, learn: Callable[[Any, bool], Tensor], device: torch.device
) -> tuple[list[float], list[float]]:
    """Take every step; only the training itself is timed, not the making of batches."""
    losses, seconds = [], []
    tell = int(os.environ["RANK"]) == 0
    for _ in range(task.steps):
        drawn = [to_device(batch, device) for batch in islice(batches, window)]
        start = _now(device)
        told = [learn(batch, place == window - 1) for place, batch in enumerate(drawn)]
        seconds.append(_now(device) - start)
        losses.append(sum(float(loss) for loss in told) / window)
        if tell:
            with task.progress.open("ab") as file:
                file.write(b".")
    return losses, seconds


def warm_up(strategy: Strategy, device: torch.device) -> None:
    """Train one layer, so that what the backend imports and the process group hold counts as no strategy's memory."""
    # What is wrong with the strategy, the training that counts will say.
    with contextlib.suppress(Exception):
        model = nn.Linear(8, 8).to(device)
        with prepare(model, torch.optim.AdamW(model.parameters()), strategy) as session:
            for _ in range(strategy.accumulate):
                session.backward(session.model(torch.ones(2, 8, device=device)).square().mean())
                session.step()


def _check_loss(workload: Workload, size: int) -> None:
    """Raise unless the loss is a scalar with a gradient, as a session will ask for."""
    loss: Any = workload.loss(workload.model, next(workload.batches(size)))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"loss of the workload returns {shape}: it returns the mean over the batch, with a gradient")


def rank_device(kind: str) -> torch.device:
    """Return this rank's device of a kind, and make it the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    place = int(os.environ["LOCAL_RANK"]) % module.device_count()
    module.set_device(place)
    return torch.device(kind, place)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device, in the same mappings, lists and tuples."""
    return mapped(batch, lambda value: value.to(device))


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with a function of each of its tensors, in the same mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, function) for value in batch)
    return batch


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
