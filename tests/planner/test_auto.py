"""``Strategy("auto")``: the fastest that fits, the same on every rank, with its reason."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import shardkit
from shardkit import Strategy
from shardkit.errors import StrategyError, UnsupportedError
from shardkit.planner import _auto
from shardkit.testing import run

SIZE = 512
WHOLE = 8 * SIZE * SIZE * 4
"""Bytes of the model's weights."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(8)])


def chosen(text: str, world_size: int = 2) -> Strategy:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    return _auto.choose(Strategy.parse(text), made, optimizer, torch.device("cpu"), world_size)


def test_with_room_for_all_it_takes_the_fastest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardkit"):
        found = chosen("auto:memory=1GiB,activations=1MiB")
    speeds = {
        variant.strategy: variant.speed or 0 for backend in shardkit.backends().values() for variant in backend.variants
    }
    assert speeds[str(found)] == max(speeds.values())
    assert f"takes {found}" in caplog.text
    assert "1 GiB per rank, 1 MiB left to activations" in caplog.text


def test_with_less_memory_it_takes_one_that_shards() -> None:
    # Four times the model is more than there is: its gradients and states must be split.
    found = chosen(f"auto:memory={int(3.9 * WHOLE)}B,activations=1KiB")
    variants = {variant.strategy: variant for backend in shardkit.backends().values() for variant in backend.variants}
    assert "optimizer" in variants[str(found)].shards


def test_the_numerics_that_were_asked_for_are_kept() -> None:
    found = chosen("auto:memory=1GiB,activations=1MiB,accumulate=3,max_grad_norm=0.5,precision=bf16")
    assert (found.accumulate, found.max_grad_norm, found.precision) == (3, 0.5, "bf16")


def test_where_nothing_fits_it_says_what_is_needed() -> None:
    with pytest.raises(UnsupportedError, match=r"nothing fits: .* needs least, .* MiB per rank"):
        chosen("auto:memory=1MiB,activations=1KiB")


def test_a_workload_says_what_the_passes_take() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    before = torch.get_rng_state()
    strategy = Strategy.parse("auto:memory=1GiB,workload=mlp,batch_size=8")
    assert _auto.choose(strategy, made, optimizer, torch.device("cpu"), 2).backend != "auto"
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UnsupportedError, match="nothing fits"):
        chosen("auto:memory=1MiB,workload=mlp,batch_size=100000")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("auto:memroy=1GiB", "did you mean 'memory'"),
        ("auto:workload=mlp", "go together"),
        ("auto:workload=mlp,batch_size=0", "at least 1, not 0"),
        ("auto:workload=mlp,batch_size=1,activations=1MiB", "not both"),
    ],
)
def test_bad_options_are_refused(text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        chosen(text)


def _prepared(text: str) -> tuple[str, float]:
    made = model()
    with shardkit.prepare(made, torch.optim.AdamW(made.parameters()), text) as session:
        loss = session.model(torch.ones(2, SIZE)).square().mean()
        session.backward(loss)
        session.step()
        return str(session.strategy), loss.item()


def test_every_rank_trains_under_the_same_choice() -> None:
    found = run(_prepared, "auto:memory=1GiB,activations=1MiB", processes=2, timeout=60)
    assert found[0] == found[1]
    assert not found[0][0].startswith("auto")
