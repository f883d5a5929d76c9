"""What a checkpoint carries beside weights: dtypes, values of the user's own, random state, and who may leave it."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import shardkit
from shardkit.errors import CheckpointError, UnsupportedError
from shardkit.testing import run
from shardkit.testing.cases._models import W, assert_close, batch, mlp, sgd, step, train, train_alone

# Values of the user's own.


def values(rank: int) -> dict[str, Any]:
    return {
        "a/b": torch.tensor([1.0, 2.0]),
        "a": {"b": torch.tensor([3.0, 4.0]), 1: torch.tensor(5), "1": torch.tensor(6), "$tensor": "no tensor"},
        "mine": {"loss": 0.1 + rank, "tensor": torch.full((2 + rank, 3), float(rank)), "ranks": (rank, {rank})},
        "kind of each rank": [None, "text", 2.5, torch.tensor([True, False])][rank],
        "numbers": [float("inf"), -0.0, 1e-323, 2**80, True, None, b"\x00\xff", torch.bfloat16, "ü\ud800"],
        "ordered": OrderedDict([("z", torch.tensor(1j)), ("y", torch.tensor([], dtype=torch.float64))]),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        "scalar": np.float32(0.1),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "strided": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type and content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and repr(one) == repr(other)


def brought_back(folder: Path, save: bool) -> str:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        given = values(session.rank)
        if save:
            session.save(folder, state=given)
            return ""
        try:
            found = session.load(folder)
        except CheckpointError as error:
            return str(error)
    assert found is not None
    given["scalar"] = float(given["scalar"])
    assert found.keys() == given.keys()
    for key, value in given.items():
        assert same(found[key], value), (key, value, found[key])
    return ""


def test_values_of_any_kind_come_back_on_the_rank_that_brought_them(tmp_path: Path) -> None:
    run(brought_back, tmp_path, True, processes=3)
    run(brought_back, tmp_path, False, processes=3)
    told = run(brought_back, tmp_path, False, processes=2)
    assert told[0] == told[1]
    assert told[0] == (
        "'state/kind of each rank' was different on each of the 3 ranks that wrote the checkpoint, so that it "
        "loads on as many, not on 2"
    )


def test_random_state_of_python_numpy_and_torch_goes_on(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float, float]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(()).item()

    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        # Both keep every second number of a pair for later.
        draw()
        session.save(tmp_path)
        wanted = draw()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        assert draw() != wanted
        session.load(tmp_path)
        assert draw() == wanted


# Dtypes.


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return (self.a.sum() * rows.to(self.a.dtype)).abs()


class Rounding(SGD):
    """SGD whose momentum is bfloat16, beside a count that is a plain number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    state = self.state[value]
                    before = state.get("moment", torch.zeros_like(value, dtype=torch.bfloat16))
                    state["moment"] = (before.float() * 0.9 + value.grad).bfloat16()
                    state["count"] = state.get("count", 0) + 1
                    value.sub_(state["moment"].to(value.dtype), alpha=group["lr"] / state["count"])


def double() -> nn.Module:
    return mlp().double()


KINDS: dict[str, tuple[Any, Any, list[str]]] = {
    "double": (double, lambda model: Adam(model.parameters()), ["ddp", "fairscale", "fairscale:shard=optimizer"]),
    "complex64": (lambda: Complex(torch.complex64), lambda model: Adam(model.parameters()), ["ddp"]),
    "complex128": (lambda: Complex(torch.complex128), lambda model: Adam(model.parameters(), amsgrad=True), ["ddp"]),
    "bf16 state": (
        mlp,
        lambda model: Rounding(model.parameters(), lr=0.1),
        ["ddp", "fairscale", "deepspeed:stage=1", "deepspeed:stage=2,offload_optimizer=cpu", "deepspeed:stage=3"],
    ),
}


def of_kind(name: str, strategy: str, folder: Path, resume: bool) -> dict[str, Tensor]:
    """Train two steps, save, and two more; or go on from a save."""
    build, stepper, _ = KINDS[name]
    model = build()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        for value in model.parameters() if resume else ():
            value.mul_(0.5)
    with shardkit.prepare(model, stepper(model), strategy) as session:
        if resume:
            session.load(folder)
        else:
            _steps(session, dtype, 0)
            session.save(folder)
        _steps(session, dtype, 2)
        return session.full_weights()


def _steps(session: shardkit.Session, dtype: torch.dtype, first: int) -> None:
    for number in (first, first + 1):
        # The same global batch on 1 and 2 ranks.
        rows = batch(number, 0)[session.rank :: session.world_size]
        rows = rows.double() if dtype.itemsize == 8 and not dtype.is_complex else rows
        step(session, session.model(rows).square().mean())


@pytest.mark.parametrize("name", KINDS)
def test_parameters_and_states_of_other_dtypes_go_on(name: str, tmp_path: Path) -> None:
    strategies = KINDS[name][2]
    expected = run(of_kind, name, strategies[0], tmp_path, False)[0]
    again = run(of_kind, name, strategies[0], tmp_path, True)[0]
    assert all(torch.equal(value, again[key]) for key, value in expected.items())
    for strategy in strategies[1:]:
        other = run(of_kind, name, strategy, tmp_path, True)[0]
        for key, value in expected.items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6)
    single = of_kind(name, "ddp", tmp_path, True)
    for key, value in expected.items():
        torch.testing.assert_close(single[key], value, rtol=1e-5, atol=1e-6)


# Schedules, which keep a value for each group.


def two_groups(model: nn.Module, backwards: bool) -> SGD:
    held = list(model.parameters())
    groups = [{"params": held[:1], "lr": 0.1}, {"params": held[1:], "lr": 0.4}]
    return SGD(groups[::-1] if backwards else groups, lr=1.0, momentum=0.9)


def turned(values: list[Any], backwards: bool) -> list[Any]:
    return values[::-1] if backwards else values


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda own, back: LambdaLR(own, turned([lambda step: 0.9**step, lambda step: 1 / (1 + step)], back)),
    "ExponentialLR": lambda own, back: ExponentialLR(own, 0.9),
    "CosineAnnealingLR": lambda own, back: CosineAnnealingLR(own, 6),
    "CyclicLR": lambda own, back: CyclicLR(own, turned([0.1, 0.4], back), turned([1.0, 2.0], back), 2),
    "OneCycleLR": lambda own, back: OneCycleLR(own, turned([1.0, 2.0], back), 12),
    "ReduceLROnPlateau": lambda own, back: ReduceLROnPlateau(
        own, patience=0, factor=0.8, min_lr=turned([0.05, 0.001], back)
    ),
    "SequentialLR": lambda own, back: SequentialLR(
        own, [LinearLR(own, total_iters=3), CosineAnnealingLR(own, 5)], milestones=[4]
    ),
    "ChainedScheduler": lambda own, back: ChainedScheduler([LinearLR(own, total_iters=5), ExponentialLR(own, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_its_groups_into_another_order(name: str, tmp_path: Path) -> None:
    def rates(session: shardkit.Session, schedule: Any, backwards: bool, steps: int) -> list[list[float]]:
        found = []
        for _ in range(steps):
            step(session, session.model(batch(0, 0)).square().mean())
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(turned([group["lr"] for group in session.optimizer.param_groups], backwards))
            assert turned(schedule.get_last_lr(), backwards) == found[-1]
        return found

    model = nn.Linear(8, 2)
    with shardkit.prepare(model, two_groups(model, False), "ddp") as session:
        schedule = SCHEDULES[name](session.optimizer, False)
        rates(session, schedule, False, 3)
        session.save(tmp_path, objects={"schedule": schedule})
        expected = rates(session, schedule, False, 6)
    assert len({tuple(each) for each in expected}) > 2
    other = nn.Linear(8, 2)
    with shardkit.prepare(other, two_groups(other, True), "ddp") as session:
        schedule = SCHEDULES[name](session.optimizer, True)
        session.load(tmp_path, objects={"schedule": schedule})
        assert rates(session, schedule, True, 6) == expected


class Own(LRScheduler):
    """A schedule with a list of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factors = [0.5, 0.9]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * factor for base, factor in zip(self.base_lrs, self.factors, strict=True)]


def test_a_list_by_group_that_cannot_be_told_apart_is_refused_in_another_order(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    with shardkit.prepare(model, two_groups(model, False), "ddp") as session:
        schedule = Own(session.optimizer)
        session.save(tmp_path, objects={"schedule": schedule})
        session.load(tmp_path, objects={"schedule": schedule})
    other = nn.Linear(8, 2)
    with shardkit.prepare(other, two_groups(other, True), "ddp") as session:
        schedule = Own(session.optimizer)
        with pytest.raises(CheckpointError, match="object 'schedule' keeps 'factors', one value for each of 2 groups"):
            session.load(tmp_path, objects={"schedule": schedule})


# Who may leave something.


def test_a_session_that_evaluates_takes_the_weights_alone(tmp_path: Path) -> None:
    model = mlp()
    with shardkit.prepare(model, Adam(model.parameters()), "deepspeed:stage=1") as session:
        schedule = ExponentialLR(session.optimizer, 0.9)
        weights = train(session, steps=2)
        session.save(tmp_path, objects={"schedule": schedule}, state={"note": "kept"})
    other = mlp(seed=1)
    with shardkit.prepare(other, None, "ddp") as session:
        assert session.load(tmp_path) == {"note": "kept"}
        assert session.steps == 2
        assert all(torch.equal(value, weights[name]) for name, value in session.full_weights().items())


class PerRank:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def with_an_object_of_each_rank(folder: Path, what: str) -> str:
    model = mlp()
    optimizer = Adam(model.parameters()) if what != "evaluate" else None
    with shardkit.prepare(model, optimizer, "ddp") as session:
        held = PerRank(session.rank)
        try:
            if what == "save":
                session.save(folder, objects={"own": held})
            else:
                session.load(folder, objects={} if what == "evaluate" else {"own": held})
        except CheckpointError as error:
            return str(error)
    return ""


def test_an_object_of_each_rank_hinders_only_who_wants_it(tmp_path: Path) -> None:
    run(with_an_object_of_each_rank, tmp_path, "save")
    assert with_an_object_of_each_rank(tmp_path, "evaluate") == ""
    assert "'objects/own' was different on each of the 2 ranks" in with_an_object_of_each_rank(tmp_path, "train")


def test_state_of_a_parameter_that_is_frozen_by_now_is_kept_or_refused(strategy: str, tmp_path: Path) -> None:
    model = mlp()
    with shardkit.prepare(model, Adam(model.parameters()), "ddp") as session:
        train(session, steps=2)
        session.save(tmp_path / "a")
        moment = session.optimizer.state[model[0].bias]["exp_avg"].clone()
    other = mlp(seed=1)
    other[0].bias.requires_grad_(False)
    with shardkit.prepare(other, Adam(other.parameters()), strategy) as session:
        if "deepspeed" in strategy and "stage=0" not in strategy:
            before = session.full_weights()
            told = r"state of '0.bias' \(16,\), and this session keeps none for it under backend 'deepspeed', since it"
            with pytest.raises(CheckpointError, match=told):
                session.load(tmp_path / "a")
            assert all(torch.equal(value, before[name]) for name, value in session.full_weights().items())
            return
        session.load(tmp_path / "a")
        session.save(tmp_path / "b")
    third = mlp(seed=2)
    with shardkit.prepare(third, Adam(third.parameters()), "ddp") as session:
        session.load(tmp_path / "b")
        assert torch.equal(session.optimizer.state[third[0].bias]["exp_avg"], moment)


def looking_again(folder: Path) -> dict[str, Tensor]:
    """Save after a forward that left other statistics on each rank, and return rank 0's."""
    model = nn.BatchNorm1d(8)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        step(session, session.model(batch(0, session.rank)).square().mean())
        session.model(batch(1, session.rank))
        session.save(folder)
        return {name: value.clone() for name, value in model.named_buffers()}


def test_buffers_are_those_of_rank_0_where_a_forward_left_others(tmp_path: Path) -> None:
    own, other = run(looking_again, tmp_path)
    assert not torch.equal(own["running_mean"], other["running_mean"])
    model = nn.BatchNorm1d(8)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        session.load(tmp_path)
        assert all(torch.equal(value, own[name]) for name, value in model.named_buffers())


# Weights in half precision.


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_weights_leave_and_come_with_their_float32_masters(stage: int, tmp_path: Path) -> None:
    half = f"deepspeed:stage={stage},precision=bf16,half_weights=true"
    first, second, third = (mlp(seed) for seed in range(3))
    with shardkit.prepare(first, Adam(first.parameters()), half) as session:
        weights = train(session, steps=2)
        session.save(tmp_path / "half")
        after = train(session, steps=1, first=2)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights.values())
    with shardkit.prepare(second, Adam(second.parameters()), "ddp") as session:
        session.load(tmp_path / "half")
        assert all(torch.equal(value, weights[name]) for name, value in session.full_weights().items())
        session.save(tmp_path / "whole")
    with shardkit.prepare(third, Adam(third.parameters()), half) as session:
        session.load(tmp_path / "whole")
        assert all(torch.equal(value, weights[name]) for name, value in session.full_weights().items())
        assert all(torch.equal(value, after[name]) for name, value in train(session, steps=1, first=2).items())


class Tiring(SGD):
    """SGD that counts its steps, in its groups and by itself, and takes smaller ones."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.turns = 0
        for group in self.param_groups:
            group["turns"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turns += 1
        for group in self.param_groups:
            group["turns"] += 1
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(value.grad, alpha=group["lr"] / self.turns / group["turns"])


def test_what_an_optimizer_counts_by_itself_goes_on(strategy: str, tmp_path: Path) -> None:
    model, other, reference = mlp(), mlp(seed=1), mlp()
    if strategy.startswith("fsdp") or ("deepspeed" in strategy and "stage=0" not in strategy):
        # It would step with pieces, each of which counts for itself.
        with pytest.raises(UnsupportedError, match="changes its own 'turns' at each step"):
            shardkit.prepare(model, Tiring(model.parameters(), lr=0.5), strategy)
        return
    with shardkit.prepare(model, Tiring(model.parameters(), lr=0.5), strategy) as session:
        train(session, steps=2)
        session.save(tmp_path)
    with shardkit.prepare(other, Tiring(other.parameters(), lr=0.5), strategy) as session:
        session.load(tmp_path)
        weights = train(session, steps=2, first=2)
    assert_close(weights, train_alone(reference, Tiring(reference.parameters(), lr=0.5), steps=4, parts=1))


def in_groups(model: nn.Module, *cuts: int) -> Adam:
    held = list(model.parameters())
    bounds = [0, *cuts, len(held)]
    return Adam([{"params": held[start:end]} for start, end in pairwise(bounds)], lr=0.05)


@pytest.mark.parametrize("cuts", [((1,), ()), ((), (2,)), ((1, 3), (2,))])
def test_groups_of_equal_settings_may_be_split_and_joined(cuts: Any, tmp_path: Path) -> None:
    model, other, reference = mlp(), mlp(seed=1), mlp()
    with shardkit.prepare(model, in_groups(model, *cuts[0]), "deepspeed:stage=1") as session:
        schedule = ExponentialLR(session.optimizer, 0.5)
        train(session, steps=2)
        schedule.step()
        session.save(tmp_path, objects={"schedule": schedule})
    with shardkit.prepare(other, in_groups(other, *cuts[1]), "fairscale") as session:
        schedule = ExponentialLR(session.optimizer, 0.5)
        session.load(tmp_path, objects={"schedule": schedule})
        assert schedule.base_lrs == [0.05] * (len(cuts[1]) + 1)
        assert (
            schedule.get_last_lr()
            == [group["lr"] for group in session.optimizer.param_groups]
            == [0.025] * len(schedule.base_lrs)
        )
        weights = train(session, steps=2, first=2)
    plain = in_groups(reference)
    train_alone(reference, plain, steps=2, parts=1)
    plain.param_groups[0]["lr"] = 0.025
    for index in (2, 3):
        plain.zero_grad()
        reference(batch(index, 0)).square().mean().backward()
        plain.step()
    assert_close(weights, dict(reference.state_dict()))


def test_groups_of_other_bounds_are_not_joined(tmp_path: Path) -> None:
    model, other = mlp(), mlp(seed=1)
    with shardkit.prepare(model, in_groups(model, 1), "ddp") as session:
        schedule = ReduceLROnPlateau(session.optimizer, min_lr=[0.01, 0.02])
        session.save(tmp_path, objects={"schedule": schedule})
    with shardkit.prepare(other, in_groups(other), "ddp") as session:
        schedule = ReduceLROnPlateau(session.optimizer, min_lr=0.01)
        with pytest.raises(CheckpointError, match="object 'schedule' keeps 'min_lrs', one value for each of 2 groups"):
            session.load(tmp_path, objects={"schedule": schedule})
