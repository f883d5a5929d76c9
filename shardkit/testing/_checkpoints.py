"""Checkpoints that move from one strategy to another, and to another number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import shardkit
from shardkit.testing.cases._models import Prepare, assert_close, batch, mlp
from shardkit.testing.cases._table import Run

STEPS = 2
"""Steps before the checkpoint: what Adam keeps counts from the second on."""

SIZES = (16, 24, 7, 8)
"""Widths of the model's layers: some don't divide by the number of ranks."""


def moves(strategy: str, others: list[str]) -> dict[str, Run]:
    """Return functions that save under a strategy and go on under another: to and from each, and to itself."""
    found: dict[str, Run] = {}
    for other in others:
        found[f"to {other}"] = _move(strategy, other)
        found[f"from {other}"] = _move(other, strategy)
    found["to itself"] = _move(strategy, strategy)
    return found


def saved(prepare: Prepare, rank: int) -> None:
    """Train under the strategy, and leave a checkpoint."""
    _save(prepare.text, prepare.folder)


def loaded(source: Path) -> Run:
    """Return a function that goes on from what two ranks have saved."""

    def go_on(prepare: Prepare, rank: int) -> None:
        _go_on(prepare.text, source, saved_on=2)

    return go_on


def _move(source: str, target: str) -> Run:
    def move(prepare: Prepare, rank: int) -> None:
        _save(source, prepare.folder)
        _go_on(target, prepare.folder, saved_on=2)

    return move


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def _save(strategy: str, folder: Path) -> None:
    model = mlp(0, SIZES)
    with shardkit.prepare(model, _optimizer(model), strategy) as session:
        _train(session, range(STEPS))
        session.save(folder)


def _go_on(strategy: str, folder: Path, saved_on: int) -> None:
    # Other weights: all must come from the checkpoint.
    model = mlp(1, SIZES)
    with shardkit.prepare(model, _optimizer(model), strategy) as session:
        session.load(folder)
        assert session.steps == STEPS
        weights = _train(session, range(STEPS, STEPS + 2))
        ranks = session.world_size
    reference = mlp(0, SIZES)
    optimizer = _optimizer(reference)
    for index in range(STEPS + 2):
        optimizer.zero_grad()
        rows = [batch(index, part, width=SIZES[0]) for part in range(saved_on if index < STEPS else ranks)]
        reference(torch.cat(rows)).square().mean().backward()
        optimizer.step()
    assert_close(weights, dict(reference.state_dict()), 2e-6)


def _train(session: shardkit.Session, steps: range) -> dict[str, torch.Tensor]:
    for index in steps:
        session.backward(session.model(batch(index, session.rank, width=SIZES[0])).square().mean())
        assert session.step()
    return session.full_weights()
