"""Backends that are wrong on purpose: what the suite is there to see, it sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import shardkit
from shardkit import Backend, Engine, Strategy, Update, Variant, hookimpl

from . import compare, tolerances
from .cells import Cell, Trace
from .compare import Distance
from .ranks import Failure, record
from .reference import reference

CELLS = {
    "sgd": Cell("mlp", "sgd", accumulate=3, clipped=False),
    "clipped": Cell("mlp", "sgd", accumulate=3, clipped=True),
    "adamw": Cell("mlp", "adamw", accumulate=3, clipped=False),
}
QUANTITIES: dict[str, tuple[float, Callable[[list[Trace], Trace], Iterator[Distance]]]] = {
    "losses": (tolerances.LOSS, compare.losses),
    "grad_norms": (tolerances.GRAD_NORM, compare.grad_norms),
    "gradients": (tolerances.GRADIENT, compare.gradients),
    "weights": (tolerances.WEIGHT, compare.weights),
}

# What is wrong, and where it has to be seen: by cell, the quantities that are beyond their tolerance.
FAULTS: dict[str, dict[str, set[str]]] = {
    "none": {},
    "summed over ranks": {
        "sgd": {"losses", "grad_norms", "gradients", "weights"},
        "adamw": {"losses", "grad_norms", "gradients", "weights"},
    },
    "not averaged over ranks": {"sgd": {"losses", "grad_norms", "gradients", "weights"}},
    "clipped per micro-batch": {"clipped": {"losses", "grad_norms", "gradients", "weights"}},
    "clipped though not asked to": {"sgd": {"losses", "weights"}},
    "no momentum": {"sgd": {"losses", "weights"}},
    "one group's decay for all": {"adamw": {"losses", "weights"}},
    "last micro-batch only": {"sgd": {"gradients", "weights"}},
}


class FaultyEngine(Engine):
    """Replicated training in a few lines, with one fault."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, fault: str) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._step = optimizer.step
        self._max_norm = strategy.max_grad_norm
        self._fault = fault
        if fault == "no momentum":
            optimizer.param_groups[0]["momentum"] = 0.0
        if fault == "one group's decay for all":
            for group in optimizer.param_groups:
                group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        if self._max_norm is not None and dist.get_rank() == 1:
            if self._fault == "fails on one rank":
                raise ArithmeticError("planted")
            if self._fault == "ends one rank":
                os._exit(3)
        if self._fault == "last micro-batch only":
            self.model.zero_grad()
        loss.backward(gradient)
        if self._fault == "clipped per micro-batch" and self._max_norm is not None:
            clip_grad_norm_(self.model.parameters(), self._max_norm)
        if last and self._fault != "not averaged over ranks":
            for value in self.model.parameters():
                dist.all_reduce(value.grad)
                if self._fault != "summed over ranks":
                    value.grad /= dist.get_world_size()  # type: ignore[operator]

    def step(self) -> Update:
        max_norm = 1.0 if self._fault == "clipped though not asked to" else self._max_norm
        norm = clip_grad_norm_(self.model.parameters(), max_norm or torch.inf).item()
        self._step()
        self.model.zero_grad()
        return Update(applied=True, grad_norm=norm)

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: value.grad.clone() for name, value in self.model.named_parameters() if value.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class FaultyPlugin:
    """A backend named ``faulty`` with one fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    @hookimpl
    def shardkit_describe(self) -> Backend:
        return Backend(name="faulty", summary="wrong on purpose", variants=(Variant(strategy="faulty", summary=""),))

    @hookimpl
    def shardkit_prepare(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> Engine:
        return FaultyEngine(model, optimizer, strategy, self._fault)


def register(fault: str) -> None:
    shardkit.register(FaultyPlugin(fault), "faulty")


@cache
def recorded(fault: str) -> dict[Cell, list[Trace] | Failure]:
    return record("faulty", 2, list(CELLS.values()), partial(register, fault))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_where_it_shows(fault: str, name: str) -> None:
    ranks = recorded(fault)[CELLS[name]]
    assert not isinstance(ranks, Failure), ranks.text
    expected = reference(CELLS[name], 2)
    seen = {
        quantity
        for quantity, (tolerance, distances) in QUANTITIES.items()
        if not compare.worst(distances(ranks, expected)).relative <= tolerance
    }
    assert seen >= FAULTS[fault].get(name, set())
    if fault == "none":
        assert not seen


@pytest.mark.parametrize(
    ("fault", "said"),
    [("fails on one rank", "ArithmeticError: planted"), ("ends one rank", "rank 1 ended with exit code 3")],
)
def test_a_cell_that_takes_its_ranks_down_fails_alone_and_says_why(fault: str, said: str) -> None:
    outcomes = dict(recorded(fault))
    broken = outcomes.pop(CELLS["clipped"])
    assert isinstance(broken, Failure)
    assert said in broken.text
    assert all(isinstance(outcome, list) for outcome in outcomes.values())
