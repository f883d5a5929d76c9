"""Runs that are interrupted and go on elsewhere, of a model with all that a checkpoint must carry by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shardkit
from shardkit.checkpoints import latest
from shardkit.checkpoints._contents import OPTIMIZER, WEIGHTS
from shardkit.checkpoints._read import Reader

ROWS = 12
"""Of a global batch, however many ranks share it."""
BEFORE, AFTER = 3, 2
"""Steps before the checkpoint and behind it."""

# Two groups of settings each, so that a parameter under the other's would show.
OPTIMIZERS: dict[str, tuple[type[Optimizer], tuple[dict[str, Any], dict[str, Any]]]] = {
    "AdamW": (AdamW, ({"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.005, "weight_decay": 0.0, "betas": (0.8, 0.99)})),
    "SGD": (SGD, ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1})),
    "Adafactor": (Adafactor, ({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.0})),
}


class Odd(nn.Module):
    """Tied, frozen, never-used, odd-sized and 0-dim parameters, and buffers. ``backwards`` registers all in reverse.

    A value depends on its name and the seed only. Quiet, a row's output doesn't depend on what other rows or ranks do.
    """

    def __init__(self, seed: int = 0, *, backwards: bool = False, noisy: bool = False) -> None:
        super().__init__()
        parts: dict[str, Any] = {
            "first": nn.Linear(5, 7),
            "norm": nn.BatchNorm1d(7),
            "second": nn.Linear(7, 7),
            "third": nn.Linear(7, 7),
            "last": nn.Linear(7, 3),
            "scale": nn.Parameter(torch.ones(())),
            "shift": nn.Parameter(torch.ones(1)),
            "odd": nn.Parameter(torch.ones(13)),
            "unused": nn.Parameter(torch.ones(4, 3)),
            "frozen": nn.Parameter(torch.ones(3, 3), requires_grad=False),
            "outside": nn.Parameter(torch.ones(7), requires_grad=False),
        }
        for name in reversed(parts) if backwards else parts:
            setattr(self, name, parts[name])
        self.third.weight = self.second.weight
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("offset", torch.ones(3))
        self.drop = nn.Dropout(0.25 if noisy else 0.0)
        if not noisy:
            self.norm.eval()
        for name, value in sorted(self.state_dict().items()):
            numbers = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            if value.is_floating_point():
                with torch.no_grad():
                    value.copy_(torch.rand(value.shape, generator=numbers) * 0.8 - 0.2)
        self.norm.running_var.add_(0.5)
        self.count.add_(100 * seed)

    def forward(self, rows: Tensor) -> Tensor:
        self.count += 1
        hidden = self.drop(torch.tanh(self.norm(self.first(rows))))
        hidden = torch.tanh(self.second(hidden)) + self.odd[:7] * self.odd[6:]
        hidden = torch.tanh(self.third(hidden)) * self.scale + self.outside + self.frozen.mean()
        result: Tensor = self.last(hidden) + self.shift + self.offset
        return result


def built(
    optimizer: str, *, seed: int = 0, backwards: bool = False, noisy: bool = False
) -> tuple[Odd, Optimizer, list[Callable[[int], float]]]:
    """Return a model, its optimizer with two groups of alternating parameters, and each group's schedule."""
    model = Odd(seed, backwards=backwards, noisy=noisy)
    held = {name: value for name, value in model.named_parameters() if name != "outside"}
    if "third.weight" in held:
        held["second.weight"] = held.pop("third.weight")
    names = sorted(held)
    kind, settings = OPTIMIZERS[optimizer]
    groups: list[dict[str, Any]] = [
        {"params": [held[name] for name in names[number::2]], **each} for number, each in enumerate(settings)
    ]
    rates: list[Callable[[int], float]] = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    if backwards:
        for group in groups:
            group["params"].reverse()
        groups.reverse()
        rates.reverse()
    return model, kind(groups, lr=1.0), rates  # type: ignore[call-arg]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's global batch."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=numbers), torch.randn(ROWS, 3, generator=numbers)


@dataclass
class Trace:
    """What a run came to on one rank: its losses, and at the end the loss scale and, on rank 0, the whole weights."""

    losses: list[float] = field(default_factory=list)
    scale: tuple[float, int] | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


def alone(optimizer: str) -> Trace:
    """Return the run that was never interrupted, in plain torch, of one process: the losses behind the checkpoint."""
    model, stepper, rates = built(optimizer)
    schedule = LambdaLR(stepper, rates)
    trace = Trace()
    for step in range(BEFORE + AFTER):
        rows, wanted = batch(step)
        loss = mse_loss(model(rows), wanted)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        schedule.step()
        if step >= BEFORE:
            trace.losses.append(loss.item())
    trace.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return trace


def train(session: shardkit.Session, schedule: LambdaLR, first: int, steps: int) -> Trace:
    """Train on this rank's part of each global batch."""
    trace = Trace()
    for step in range(first, first + steps):
        own = [part[session.rank :: session.world_size] for part in batch(step)]
        for rows, wanted in zip(*(part.chunk(session.strategy.accumulate) for part in own), strict=True):
            loss = mse_loss(session.model(rows), wanted)
            session.backward(loss)
            if session.step():
                schedule.step()
            trace.losses.append(loss.item())
    trace.scale = None if session.scaler is None else (session.scaler.scale, session.scaler.growth_tracker)
    weights = session.full_weights()
    if session.rank == 0:
        trace.weights = weights
    return trace


Job = tuple[str, str]
"""A strategy and an optimizer."""


def place(folder: Path, job: Job, world_size: int) -> Path:
    """Return the directory of a run's checkpoint."""
    return folder / f"{job[0]} {job[1]} {world_size}".replace("=", "-")


def begin(
    jobs: Sequence[Job], folder: Path, noisy: bool = False, go_on: bool = False, freezing: bool = False
) -> list[Trace]:
    """Start runs, one after another, and save each; return how each goes on if nothing interrupts it, where wanted.

    ``freezing`` freezes a layer before the last step.
    """
    traces = []
    for strategy, optimizer in jobs:
        clear()
        model, stepper, rates = built(optimizer, noisy=noisy)
        torch.manual_seed(7)
        with shardkit.prepare(model, stepper, strategy) as session:
            schedule = LambdaLR(session.optimizer, rates)
            train(session, schedule, 0, BEFORE - 1)
            model.first.requires_grad_(not freezing)
            train(session, schedule, BEFORE - 1, 1)
            session.save(place(folder, (strategy, optimizer), session.world_size), objects={"schedule": schedule})
            traces.append(train(session, schedule, BEFORE, AFTER if go_on else 0))
    return traces


def resume(
    job: Job,
    sources: Sequence[Path],
    copies: Path | None = None,
    *,
    noisy: bool = False,
    backwards: bool = True,
    freezing: bool = False,
) -> list[Trace]:
    """Go on from each of these checkpoints, one after another, in one session that begins from other values.

    ``copies`` is where each is saved again before the session goes on.
    """
    clear()
    strategy, optimizer = job
    model, stepper, rates = built(optimizer, seed=1, backwards=backwards, noisy=noisy)
    torch.manual_seed(8)
    traces = []
    with shardkit.prepare(model, stepper, strategy) as session:
        schedule = LambdaLR(session.optimizer, rates)
        for number, source in enumerate(sources):
            session.load(source, objects={"schedule": schedule})
            # Now, since DeepSpeed has no place for the state of what was frozen at prepare.
            model.first.requires_grad_(not freezing)
            if copies is not None:
                session.save(copy_of(copies, job, number), objects={"schedule": schedule})
            traces.append(train(session, schedule, session.steps + session.skipped_steps, AFTER))
    return traces


def copy_of(copies: Path, job: Job, number: int) -> Path:
    """Return where a run saves again what it went on from."""
    return copies / f"{job[0]} {job[1]} from {number}".replace("=", "-")


def resume_each(
    jobs: Sequence[tuple[Job, Sequence[Path]]],
    copies: Path | None = None,
    exactly: bool = False,
    freezing: bool = False,
) -> list[list[Trace]]:
    """Go on from checkpoints under one strategy after another; ``exactly`` as they would have, noise and order too."""
    settings: dict[str, Any] = {"noisy": exactly, "backwards": not exactly, "freezing": freezing}
    return [resume(job, sources, copies, **settings) for job, sources in jobs]


def clear() -> None:
    """Leave the garbage of earlier sessions to itself."""
    # A library that collects garbage at each start need not walk through what earlier sessions left.
    gc.collect()
    gc.freeze()


def contents(path: Path) -> dict[str, Tensor]:
    """Return the weights and the optimizer's state that a checkpoint holds, a tied parameter under one name."""
    found = {}
    with Reader(latest(path) or path) as reader:
        for file in (WEIGHTS, OPTIMIZER):
            for name in reader.specs(file):
                found[f"{file}: {name.replace('third.weight', 'second.weight')}"] = reader.read(file, name)
    return found


def settings(path: Path) -> dict[str, Any]:
    """Return the settings of each parameter that a checkpoint holds: the optimizer's, and the schedule's base rate."""
    with Reader(latest(path) or path) as reader:
        held = reader.manifest
    found = {}
    for number, group in enumerate(held["optimizer"]["groups"]):
        for name in group["parameters"]:
            base = held["objects"]["schedule"]["base_lrs"][number]
            found[name.replace("third.weight", "second.weight")] = {**group["settings"], "base": base}
    return found
