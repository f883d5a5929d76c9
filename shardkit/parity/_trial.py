"""One run of the work, as its ranks do it."""

from __future__ import annotations

import dataclasses
import faulthandler
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from shardkit import _registry
from shardkit._prepare import overriding, prepare, resolve
from shardkit._session import Session
from shardkit._strategy import Strategy
from shardkit.errors import InputError, NonFiniteError, ShardkitError
from shardkit.parity import _plain
from shardkit.parity._loop import run_loop
from shardkit.parity._record import Recording, record
from shardkit.parity._reference import train_reference
from shardkit.parity._work import Task, Work, function_of
from shardkit.tools._memory import PeakMemory
from shardkit.tools._trial import rank_device, to_device, warm_up
from shardkit.workloads import Workload
from shardkit.workloads._contract import check_batches, check_weights

_WARM_UP_STEPS = 2
"""Steps that the speed leaves out: the first allocate buffers and optimizer states."""


@dataclass(frozen=True)
class Told:
    """What a rank has to say: an error of shardkit's, or the median seconds of a step and the peak memory in bytes."""

    refusal: str = ""
    step_seconds: float = 0.0
    samples_per_second: float | None = None
    peak_memory: int = 0


def run_task(task: Task) -> Told:
    """Run a task on this rank."""
    # Where it was when the time ran out: the log shows it, and the one who waits kills it just after.
    faulthandler.dump_traceback_later(max(1.0, task.timeout - 3), exit=False)
    try:
        function, is_loop = function_of(task.work.target)
        if task.kind == "reference":
            _check_workload(function, task.work)
            train_reference(task, function)
            return Told()
        with overriding(control=task.control, any_version=task.any_version):
            return _run_loop(task, function) if is_loop else _run_workload(task, function)
    except NonFiniteError:
        # Nothing is refused: the work itself diverged.
        raise
    except ShardkitError as refusal:
        return Told(refusal=f"{type(refusal).__name__}: {refusal}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_workload(task: Task, make: Callable[[], Workload]) -> Told:
    work = task.work
    device = rank_device(work.device)
    if task.kind == "baseline":
        _registry.register(_plain.Plugin(), _plain.NAME)
        strategy = Strategy(_plain.NAME)
    else:
        strategy = resolve(task.strategy)
    strategy = dataclasses.replace(
        strategy, accumulate=work.accumulate, max_grad_norm=work.max_grad_norm, seed=work.seed
    )
    make()
    if not task.control and not task.any_version:
        # Not every library bears a second process group in one process.
        warm_up(strategy, device)
    memory = PeakMemory.start(device)
    workload = make()
    model = workload.model.to(device).train()
    with prepare(model, workload.optimizer, strategy) as session:
        batches = islice(workload.batches(work.batch_size), session.rank, None, session.world_size)
        with record(session, task.trace, detail=task.detail) as recording:  # type: ignore[arg-type]
            recording.progress = _teller(task, session)
            for _ in range(work.steps * work.accumulate):
                batch = to_device(next(batches), device)
                recording.batch(batch)
                _learn(session, workload, batch)
            peak = memory.read()
            recording.add("peak_memory", peak)
        return _told(recording, work, peak)


def _learn(session: Session, workload: Workload, batch: Any) -> None:
    engine = session._engine
    if isinstance(engine, _plain.PlainEngine):
        with engine.micro_batch():
            session.backward(workload.loss(engine.called(), batch))
    else:
        session.backward(workload.loss(session.model, batch))
    session.step()


def _run_loop(task: Task, loop: Callable[..., Any]) -> Told:
    memory = PeakMemory.start(rank_device(task.work.device))
    strategy = resolve(task.strategy)
    if task.work.seed is not None:
        strategy = dataclasses.replace(strategy, seed=task.work.seed)

    def begun(recording: Recording, session: Session) -> None:
        recording.progress = _teller(task, session)

    recording = run_loop(
        loop,
        strategy,
        task.trace,
        detail=task.detail,
        begun=begun,
        ended=lambda recording: recording.add("peak_memory", memory.read()),
    )
    return _told(recording, None, memory.read())


def _told(recording: Recording, work: Work | None, peak: int) -> Told:
    seconds = recording.step_seconds[_WARM_UP_STEPS:]
    median = statistics.median(seconds) if seconds else 0.0
    samples = work.batch_size * work.accumulate * work.processes if work is not None else 0
    return Told("", median, samples / median if samples and median else None, peak)


def _teller(task: Task, session: Session) -> Callable[[], None]:
    def tell() -> None:
        if session.rank == 0:
            with Path(task.progress).open("ab") as file:
                file.write(b".")

    return tell


def _check_workload(make: Callable[[], Workload], work: Work) -> None:
    scratch = check_weights(make)
    check_batches(scratch, work.batch_size, work.processes * work.accumulate * min(work.steps, 4))
    loss: Any = scratch.loss(scratch.model, next(scratch.batches(work.batch_size)))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError("loss of the workload returns the mean over the batch, a scalar tensor with a gradient")
