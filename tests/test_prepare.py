"""What prepare refuses: the same clear error on every rank, and the process goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit import errors
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd, step


def refused(build: Callable[[int], tuple[Any, Any, Any]]) -> tuple[str, str]:
    """Return the error that prepare raises; then train right, to see that nothing of it stays behind."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        shardkit.prepare(*build(rank))
    except errors.ShardkitError as error:
        told = type(error).__name__, str(error)
    else:
        told = "nothing", ""
    assert not dist.is_initialized()
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        step(session, session.model([1.0]))
        assert torch.equal(session.full_weights()["w"], torch.tensor([0.9]))
    return told


def given(model: Any = None, optimizer: Any = None, strategy: Any = "ddp") -> Callable[[int], tuple[Any, Any, Any]]:
    """Return what builds a call with one thing wrong."""

    def build(rank: int) -> tuple[Any, Any, Any]:
        made = W(1) if model is None else model() if callable(model) else model
        chosen = optimizer(made) if callable(optimizer) else optimizer
        return made, sgd(W(1)) if chosen is None else chosen, strategy

    return build


def two_devices() -> nn.Module:
    model = nn.Sequential(W(1), W(1))
    model[1].to("meta")
    return model


def own(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model)


BAD = {
    "unknown backend": (given(strategy="dpp", optimizer=own), "BackendNotFoundError", "did you mean 'ddp'"),
    "unknown option": (given(strategy="ddp:x=1", optimizer=own), "StrategyError", "has no option 'x'"),
    "bad accumulation": (given(strategy="ddp:accumulate=0", optimizer=own), "StrategyError", "at least 1, not 0"),
    "bad norm": (given(strategy="ddp:max_grad_norm=0", optimizer=own), "StrategyError", "above 0"),
    "no strategy": (given(strategy=3, optimizer=own), "StrategyError", "not a int"),
    "missing file": (given(strategy="none.json", optimizer=own), "StrategyError", "no strategy file"),
    "precision of the weights": (
        given(model=lambda: W(1).double(), strategy="ddp:precision=bf16", optimizer=own),
        "InputError",
        "'w' is torch.float64: convert the model with model.float()",
    ),
    "no module": (given(model="model"), "InputError", "not a str"),
    "no parameters": (given(model=nn.ReLU), "InputError", "has no parameters"),
    "meta device": (given(model=lambda: W(1).to("meta"), optimizer=own), "InputError", "on the meta device"),
    "two devices": (
        given(model=two_devices, optimizer=own),
        "InputError",
        "several devices ('0.w' on cpu, '1.w' on meta)",
    ),
    "lazy": (given(model=lambda: nn.LazyLinear(2)), "InputError", "not initialized yet"),
    "no optimizer": (given(optimizer="adam"), "InputError", "not a str"),
    "foreign": (given(), "InputError", "1 parameters that are not the model's, the first of shape (1,)"),
    "empty": (given(optimizer=lambda m: torch.optim.SGD([{"params": []}])), "InputError", "has no parameters"),
    "closure": (given(optimizer=lambda m: torch.optim.LBFGS(m.parameters())), "UnsupportedError", "through a closure"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_process(name: str) -> None:
    build, kind, message = BAD[name]
    told = refused(build)
    assert told[0] == kind
    assert message in told[1]


def all_refused() -> dict[str, tuple[str, str]]:
    return {name: refused(build) for name, (build, _, _) in BAD.items()}


def test_bad_input_is_refused_with_the_same_words_on_two_ranks() -> None:
    first, second = run(all_refused)
    assert first == second
    for name, (_, kind, message) in BAD.items():
        assert first[name][0] == kind
        assert message in first[name][1]


def on_rank_1(wrong: Callable[[int], Any], right: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda rank: (wrong if rank == 1 else right)(rank)


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(rate), foreach=False)


DIFFERENT = {
    "error on one rank": (
        on_rank_1(BAD["no parameters"][0], given(optimizer=own)),
        "InputError",
        "rank 1: the model ReLU",
    ),
    "strategies": (
        on_rank_1(given(strategy="ddp:accumulate=2", optimizer=own), given(optimizer=own)),
        "MismatchError",
        "(strategy): rank 0: ddp; rank 1: ddp:accumulate=2",
    ),
    "shapes": (
        on_rank_1(given(model=lambda: nn.Linear(2, 1), optimizer=own), given(lambda: nn.Linear(3, 1), optimizer=own)),
        "MismatchError",
        "(parameters, weight): rank 0: (1, 3) of torch.float32; rank 1: (1, 2) of torch.float32",
    ),
    "settings in a tensor": (
        on_rank_1(given(optimizer=lambda m: adam(m, 0.2)), given(optimizer=lambda m: adam(m, 0.1))),
        "MismatchError",
        "(settings of group 0, lr)",
    ),
    "frozen": (
        on_rank_1(given(model=lambda: W(1).requires_grad_(False), optimizer=own), given(optimizer=own)),
        "MismatchError",
        "rank 1: (1,) of torch.float32, frozen",
    ),
    "settings": (
        on_rank_1(given(optimizer=lambda m: sgd(m, lr=0.2)), given(optimizer=own)),
        "MismatchError",
        "(settings of group 0, lr): rank 0: 0.1; rank 1: 0.2",
    ),
}


def all_different() -> dict[str, tuple[str, str]]:
    return {name: refused(build) for name, (build, _, _) in DIFFERENT.items()}


def test_ranks_that_bring_different_things_are_refused_with_the_same_words() -> None:
    first, second = run(all_different)
    assert first == second
    for name, (_, kind, message) in DIFFERENT.items():
        assert first[name][0] == kind, first[name]
        assert message in first[name][1]


def test_without_a_launcher_one_process_has_a_group_of_its_own() -> None:
    model = W(1)
    session = shardkit.prepare(model, sgd(model), "ddp")
    assert dist.is_initialized()
    assert (session.rank, session.world_size) == (0, 1)
    session.close()
    session.close()
    assert not dist.is_initialized()


def test_a_group_of_the_users_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = W(1)
        with shardkit.prepare(model, sgd(model), "ddp") as session:
            step(session, session.model([1.0]))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_the_last_session_closes_the_group() -> None:
    first, second = W(1), W(1)
    one, two = (shardkit.prepare(model, sgd(model), "ddp") for model in (first, second))
    one.close()
    assert dist.is_initialized()
    step(two, two.model([1.0]))
    two.close()
    assert not dist.is_initialized()


def test_half_of_a_launchers_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = W(1)
    with pytest.raises(errors.StateError, match="RANK, WORLD_SIZE set without MASTER_ADDR, MASTER_PORT"):
        shardkit.prepare(model, sgd(model), "ddp")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set without RANK"),
        ({"RANK": "0"}, "RANK set without WORLD_SIZE"),
        (
            {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RANK=3 and WORLD_SIZE=2 can't be",
        ),
    ],
)
def test_a_launchers_variables_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = W(1)
    with pytest.raises(errors.StateError, match=message):
        shardkit.prepare(model, sgd(model), "ddp")


def by_file(folder: Path, same: bool) -> str:
    """Prepare from files of other places, with the same contents or not."""
    rank = int(os.environ["RANK"])
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"backend": "ddp", "options": {"bucket_cap_mb": 1 if same else rank + 1}}))
    model = W(1)
    try:
        with shardkit.prepare(model, sgd(model), str(path)):
            return "prepared"
    except errors.MismatchError as error:
        return str(error)


def test_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    assert run(by_file, tmp_path, True) == ["prepared", "prepared"]
    first, second = run(by_file, tmp_path, False)
    assert first == second
    assert "bucket_cap_mb=1; rank 1: ddp:bucket_cap_mb=2" in first


def draws(strategy: str) -> list[float]:
    values = []
    for seed in (5, 5, 6):
        model = nn.Sequential(W(1))
        with shardkit.prepare(model, sgd(model), f"{strategy}:seed={seed}"):
            values.append(torch.rand(1).item())
    return values


def test_a_seed_repeats_and_differs_among_ranks() -> None:
    first, second = run(draws, "ddp")
    assert first[0] == first[1]
    assert first[0] != first[2]
    assert first[0] != second[0]
    assert first[2] == second[0]
