"""One trial, as one of its ranks runs it: a few steps of a workload under a strategy, within a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._prepare import prepare
from shardkit._processes import Processes
from shardkit._strategy import Strategy
from shardkit.bench import _budget
from shardkit.bench._evaluation import evaluate, now
from shardkit.errors import InputError, ShardkitError
from shardkit.tools._trial import rank_device, to_device
from shardkit.workloads import Workload, _find
from shardkit.workloads._contract import check_size


@dataclass(frozen=True)
class Task:
    """What all ranks of a trial do: ``steps`` windows of batches of one size. ``budget`` None sets no limit.

    ``workload`` is the name of one, or the function that makes it. ``timed`` leaves the allocator as it is, whose fixed
    threshold costs time; ``evaluate`` evaluates after the last step.
    """

    workload: str | Callable[[], Workload]
    strategy: Strategy
    batch: int
    steps: int
    budget: int | None
    device: str
    timed: bool = False
    evaluate: bool = False


@dataclass
class Record:
    """What a rank has to say of a trial. Memory is in bytes, ``peak``, ``reserved`` and ``held`` above ``base``.

    ``outcome`` is ``"fits"``, ``"out of memory"``, ``"refused"`` (an error of shardkit's) or ``"error"``. ``held`` is
    what was held after each step, and ``in_use`` what the allocator had given out then, and once more after a garbage
    collection. ``asked`` is what could not be allocated, 0 if that isn't known. ``time`` is by the
    clock of the system, which the ranks have in common. ``tokens`` is of a batch, where the workload says it, and
    ``evaluation`` an :class:`~shardkit.bench._evaluation.Evaluation` as a mapping, empty without one.
    """

    outcome: str = "fits"
    base: int = 0
    peak: int = 0
    reserved: int = 0
    asked: int = 0
    held: list[int] = dataclasses.field(default_factory=list)
    in_use: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: int | None = None
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = ""
    message: str = ""
    traceback: str = ""
    time: float = 0.0


class Files:
    """The files of one rank in the folder of a trial."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.record = folder / f"record-{rank}.json"
        self.base = folder / f"base-{rank}.json"
        self.progress = folder / f"progress-{rank}"
        self.log = folder / f"log-{rank}"


READY, PREPARED, STEP = b"r", b"p", b"s"
"""What a rank appends to its file of progress: before the model is made, before the first step, after each step."""


def run(task: Task, files: Files) -> None:
    """Run the trial on this rank and write down what came of it; raises nothing."""
    record = Record()
    memory: _budget.Memory | None = None
    with files.log.open("ab") as log:
        faulthandler.enable(log)
        # Where it hangs, for the one who waits to ask.
        faulthandler.register(signal.SIGUSR1, log)
        try:
            if not task.timed:
                _budget.fix_allocator()
            device = rank_device(task.device)
            make = task.workload if callable(task.workload) else _find.function(task.workload)
            # Holds the process group, so that it counts as none of the training's memory.
            processes = Processes(device)
            _warm_up(task.strategy, device)
            memory = _budget.memory(device)
            record.base = memory.base
            files.base.write_text(json.dumps({"base": memory.base}))
            _tell(files, READY)
            if task.budget is not None:
                memory.limit(task.budget)
            _train(task, make, processes, device, memory, record, files)
        except BaseException as error:
            if memory is not None:
                # Or there may be no memory to say so with.
                memory.lift()
            _describe(error, record, memory, task.budget)
        if memory is not None:
            memory.lift()
            record.peak, record.reserved = memory.peak(), memory.reserved()
        draft = files.record.with_suffix(".draft")
        draft.write_text(json.dumps(dataclasses.asdict(record)))
        draft.rename(files.record)


def _train(
    task: Task,
    make: Callable[[], Workload],
    processes: Processes,
    device: torch.device,
    memory: _budget.Memory,
    record: Record,
    files: Files,
) -> None:
    """Train, and note what is held after each step, and the seconds that it took without the making of batches."""
    workload: Any = make()
    if not isinstance(workload, Workload):
        raise InputError(
            f"the workload's function returns a {type(workload).__name__}: it returns a "
            "shardkit.Workload(model, optimizer, loss, batches)"
        )
    model = workload.model.to(device).train()
    # Never closed, since the process ends: that would make the weights whole, for which there may be no memory, and
    # after an error wait for ranks that have none.
    session = prepare(model, workload.optimizer, task.strategy)
    batches = islice(workload.batches(task.batch), session.rank, None, session.world_size)
    _tell(files, PREPARED)
    for _ in range(task.steps):
        seconds = 0.0
        for _ in range(task.strategy.accumulate):
            batch = to_device(_checked(batches, task.batch), device)
            if record.tokens is None and workload.tokens is not None:
                record.tokens = int(workload.tokens(batch))
            start = now(device)
            loss = workload.loss(session.model, batch)
            _check_loss(loss)
            session.backward(loss)
            session.step()
            seconds += now(device) - start
            del loss
        record.seconds.append(seconds)
        record.held.append(memory.held())
        record.in_use.append(memory.in_use())
        _tell(files, STEP)
    gc.collect()
    record.in_use.append(memory.in_use())
    if task.evaluate:
        found = evaluate(workload, session, task.batch, device, lambda: _tell(files, STEP))
        record.evaluation = dataclasses.asdict(found)
    # A rank that ends may take from another what it has yet to receive.
    processes.meet("the end of a trial", 600)


def _checked(batches: Iterator[Any], size: int) -> Any:
    batch = next(batches, None)
    if batch is None:
        raise InputError(f"batches({size}) of the workload ends: it is endless")
    check_size(batch, size)
    return batch


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"loss of the workload returns {shape}: it returns the mean over the batch, with a gradient")


def _describe(error: BaseException, record: Record, memory: _budget.Memory | None, budget: int | None) -> None:
    asked = None if memory is None else _budget.refused_bytes(error, memory.reserved(), budget)
    record.time = time.time()
    record.kind = type(error).__name__
    record.message = str(error)
    record.traceback = "".join(traceback.format_exception(error))
    if asked is not None:
        record.outcome, record.asked = "out of memory", asked
    else:
        record.outcome = "refused" if isinstance(error, ShardkitError) else "error"


def _tell(files: Files, what: bytes) -> None:
    with files.progress.open("ab") as file:
        file.write(what)


def _warm_up(strategy: Strategy, device: torch.device) -> None:
    """Train a little of everything, so that what libraries load and keep counts as no training's memory."""
    # What is wrong with the strategy, the training that counts will say.
    with contextlib.suppress(Exception):
        model = _Little().to(device)
        with prepare(model, torch.optim.AdamW(model.parameters()), strategy) as session:
            for _ in range(2 * strategy.accumulate):
                session.backward(session.model(torch.ones(2, 3, 16, 16, device=device)).float().square().mean())
                session.step()


class _Little(nn.Module):
    """A convolution, attention and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 64, 3, padding=1)
        self.embedding = nn.Embedding(16, 64)
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Linear(64, 192)
        self.outer = nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        positions = torch.arange(16, device=images.device)
        words = self.convolution(images).mean(2).transpose(1, 2) + self.embedding(positions)
        query, key, value = self.inner(self.norm(words)).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        by_hand = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(16), dim=-1) @ value
        together = nn.functional.dropout(mixed + by_hand, 0.1).transpose(1, 2).reshape(2, 16, 64)
        return nn.functional.gelu(self.outer(together))
