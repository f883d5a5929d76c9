"""Real sessions on two ranks, recorded in a few launches, each with one thing done otherwise."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardkit
from shardkit import Strategy

from . import faulty

STEPS = 6
SAMPLES = 24
"""In a step: 4 in each of 3 micro-batches on 2 ranks."""


@dataclass(frozen=True)
class Run:
    """One session: under a strategy, with a fault of the engine or of the loop."""

    strategy: str = "faulty:accumulate=3"
    optimizer: str = "sgd"
    fault: str = ""
    loop: str = ""
    steps: int = STEPS


class Net(nn.Module):
    """A few layers, of which one is frozen and one is never called."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.outer = nn.Linear(12, width)
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(torch.tanh(self.outer(values))))
        return self.head(hidden + torch.tanh(self.frozen(hidden))).squeeze(-1)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention, whose key bias has a gradient of nothing but round-off: softmax takes no notice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        words = values.view(-1, 3, 4)
        weights = (self.query(words) @ self.key(words).mT).softmax(-1)
        return self.head((weights @ self.value(words)).mean(1)).squeeze(-1)  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    weights = [value for value in model.parameters() if value.dim() > 1]
    biases = [value for value in model.parameters() if value.dim() == 1]
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    if kind == "adam":
        return torch.optim.Adam(groups, lr=1e-2)
    if kind == "adamw, eps 1e-3":
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    return torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int, loop: str = "") -> tuple[Tensor, Tensor]:
    """Return the samples of a step, of all ranks and micro-batches."""
    step += {"data, a step on": 1}.get(loop, 0)
    if loop == "data in another order":
        step = {2: 3, 3: 2}.get(step, step)
    if loop == "other data" and step == 2:
        step = 1000
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(SAMPLES, 12, generator=generator)
    return values, (3.0 * values[:, 0] + values[:, 1].square()) * (1.0 + 0.3 * step)


def record(run: Run, path: Path) -> None:
    """Train under the strategy, and write the trace."""
    torch.manual_seed(1 if run.loop == "another start" else 0)
    model: nn.Module = Net(20 if run.loop == "another model" else 16)
    if run.loop == "attention":
        model = Attention()
    optimizer = optimizer_of(model, run.optimizer)
    strategy = Strategy.parse(run.strategy)
    with shardkit.prepare(model, optimizer, strategy) as session, shardkit.parity.record(session, path):
        count = strategy.accumulate
        size = SAMPLES // (count * session.world_size)
        factor, ahead = {"half the rate": 0.5}.get(run.loop, 1.0), {"schedule a step on": 1}.get(run.loop, 0)
        schedule = LambdaLR(session.optimizer, lambda at: factor / (1.0 + at + ahead))
        advance = {"schedule per process": session.world_size, "schedule per micro-batch": count}.get(run.loop, 1)
        for step in range(run.steps):
            values, targets = batch(step, run.loop)
            for micro in range(count):
                rank = 0 if run.loop == "one batch for all ranks" else session.rank
                if run.loop == "ranks the other way round":
                    rank = session.world_size - 1 - rank
                at = slice((micro * session.world_size + rank) * size, (micro * session.world_size + rank + 1) * size)
                loss = (session.model(values[at]) - targets[at]).square().mean()
                if run.loop == "sum over samples":
                    loss = loss * size
                if run.loop == "loss over accumulation":
                    loss = loss / count
                session.backward(loss)
                session.step()
            for _ in range(advance):
                schedule.step()
            if run.loop == "fails" and step == 3:
                raise ArithmeticError("planted")


def record_all(folder: Path, runs: Iterable[tuple[str, Run]]) -> None:
    """Record each run under its name. For every rank of a launch."""
    plugin = faulty.register()
    for name, run in runs:
        plugin.fault = run.fault
        with warnings.catch_warnings():
            # A step that is left out is told of.
            warnings.filterwarnings("ignore", message=".*was left out on every rank")
            with contextlib.suppress(ArithmeticError) if run.loop == "fails" else contextlib.nullcontext():
                record(run, folder / f"{name}.safetensors")


SETTINGS: dict[str, Any] = {"processes": 2, "timeout": 90}
