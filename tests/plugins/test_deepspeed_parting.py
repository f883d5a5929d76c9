"""Stage 3: ranks that run different modules are told so, all alike and soon, whatever they wait in."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit.errors import StateError, UnsupportedError
from shardkit.testing import run
from shardkit.testing.cases._models import W, assert_close, batch, mlp, sgd, step, train, train_alone


def _twice(model: Any, rank: int, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss + model(x).square().mean() if rank == 0 else loss


def _layer_twice(model: Any, rank: int, x: Tensor) -> Tensor:
    out = model[2](model[0](x))
    return (model[2](out.repeat(1, 2)) if rank == 0 else out).square().mean()


def _no_module(model: Any, rank: int, x: Tensor) -> Tensor:
    return model(x).square().mean() if rank == 0 else torch.zeros((), requires_grad=True) * 1.0


def _another_layer(model: Any, rank: int, x: Tensor) -> Tensor:
    return model[0](x).square().mean() if rank == 0 else model[2](x.repeat(1, 2)).square().mean()


WAYS = {
    "the whole module once more": (_twice, "rank 0 at '0', rank 1 at '2' in backward"),
    "a layer once more": (_layer_twice, "rank 0 at '2', rank 1 at '2' in backward"),
    "no module at all": (_no_module, "rank 0 at '0', rank 1 at the end of its backward"),
    "another layer": (_another_layer, "rank 0 at '0', rank 1 at '2'"),
}


def _part(way: str, known: int) -> tuple[str, float]:
    model = mlp()
    session = shardkit.prepare(model, sgd(model), "deepspeed:stage=3")
    train(session, steps=known)
    start = time.monotonic()
    with pytest.raises(UnsupportedError) as caught:
        step(session, WAYS[way][0](session.model, session.rank, batch(0, session.rank)))
    took = time.monotonic() - start
    if known:
        # A rank is still in a collective: the weights are out of reach, and the process is not.
        with pytest.raises(StateError, match="from a checkpoint"):
            session.close()
    else:
        session.close()
        assert_close(dict(model.state_dict()), dict(mlp().state_dict()))
    other = W(1)
    with shardkit.prepare(other, sgd(other), "deepspeed:stage=3") as session:
        step(session, session.model([1.5]))
        assert_close(session.full_weights()["w"], [0.85])
    return str(caught.value), took


@pytest.mark.parametrize("known", [0, 2], ids=["in the first step", "from a path that all know"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_part_are_all_refused_within_seconds(way: str, known: int) -> None:
    (first, took), (second, also_took) = run(_part, way, known, processes=2, timeout=60)
    assert f"the ranks parted ({WAYS[way][1]})" in first
    assert "deepspeed:stage=2 or ddp" in first
    assert first == second
    assert max(took, also_took) < 15


@pytest.mark.parametrize("known", [0, 2], ids=["in the first step", "from a path that all know"])
def test_of_three_ranks_all_hear_that_one_has_parted(known: int) -> None:
    messages = {message for message, _ in run(_part, "no module at all", known, processes=3, timeout=90)}
    assert len(messages) == 1
    assert "rank 1 at the end of its backward, rank 2 at the end of its backward" in messages.pop()


class _Conditional(nn.Module):
    """A module that uses its second parameter when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.eye(8)), nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return torch.tanh(x @ self.w) @ self.u if use else torch.tanh(x @ self.w)


def _use_on_one_rank(strategy: str) -> str:
    model = nn.ModuleList([_Conditional() for _ in range(4)])
    session = shardkit.prepare(model, sgd(model), strategy)
    x = batch(0, session.rank)
    for at, part in enumerate(session.model):
        x = part(x, at < 3 or session.rank == 0)
    try:
        step(session, x.square().mean())
    except UnsupportedError as error:
        return str(error)
    return "trained"


def test_a_gradient_on_one_rank_only_never_meets_a_gather_of_another() -> None:
    """With buckets so small that a gradient is averaged while modules still gather."""
    first, second = run(_use_on_one_rank, "deepspeed:stage=3,reduce_bucket_size=70", processes=2, timeout=60)
    assert "a parameter that its module uses on some ranks only" in first
    assert first == second
    assert run(_use_on_one_rank, "deepspeed:stage=2,reduce_bucket_size=70", processes=2) == ["trained"] * 2
    assert run(_use_on_one_rank, "deepspeed:stage=3", processes=2) == ["trained"] * 2


def _wait(seconds: float) -> dict[str, Tensor]:
    model = mlp()
    with shardkit.prepare(model, sgd(model), "deepspeed:stage=3") as session:
        for index in range(3):
            # One rank is late to a gate in the first step, and to a gather in the others.
            time.sleep(seconds if session.rank == index % 2 else 0)
            train(session, steps=1, first=index)
        return session.full_weights()


def test_a_rank_that_is_late_is_waited_for() -> None:
    reference = mlp()
    expected = train_alone(reference, sgd(reference), steps=3, parts=2)
    for weights in run(_wait, 2.5, processes=2, timeout=60):
        assert_close(weights, expected)


def _go_on(folder: str) -> dict[str, Tensor]:
    model = mlp()
    with shardkit.prepare(model, sgd(model), "deepspeed:stage=3") as session:
        session.save(folder)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="the ranks parted"):
                session.model[0 if session.rank else 2](torch.ones(1, 8 if session.rank else 16))
        session.load(folder)
        return train(session, steps=2)


def test_after_ranks_have_parted_at_a_gate_a_checkpoint_brings_the_session_back(tmp_path: Any) -> None:
    reference = mlp()
    expected = train_alone(reference, sgd(reference), steps=2, parts=2)
    for weights in run(_go_on, str(tmp_path / "state"), processes=2, timeout=60):
        assert_close(weights, expected)
