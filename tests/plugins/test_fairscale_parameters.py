"""FullyShardedDataParallel under shardkit, on CPU with streams that do nothing: its engine's numbers, not its CUDA."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Backend, ModelSize, ParameterSize, Strategy, Variant, hookimpl
from shardkit._checks import check_fit
from shardkit._registry import describe
from shardkit.errors import UnsupportedError
from shardkit.testing import run
from shardkit.testing.cases._models import assert_close, batch, mlp, step, train, train_alone

pytest.importorskip("fairscale")

STRATEGY = "fairscale:shard=parameters"


def test_on_the_cpu_it_is_refused_before_fairscale_is_imported_with_what_does_the_same() -> None:
    script = (
        "import sys, torch, shardkit\n"
        "model = torch.nn.Linear(2, 2)\n"
        "try:\n"
        f"    shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=.1), {STRATEGY!r})\n"
        "except shardkit.errors.UnsupportedError as error:\n"
        "    print(error, 'fairscale' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "'fairscale:shard=parameters' of backend 'fairscale' runs on cuda, not on cpu" in said
    assert "CUDA streams; use the strategy 'fsdp'" in said
    assert said.endswith("False\n")


def test_a_variant_is_refused_only_where_it_does_not_run() -> None:
    backend = describe("fairscale")
    check_fit(backend, Strategy.parse(STRATEGY), torch.device("cuda"))
    check_fit(backend, Strategy.parse("fairscale:shard=optimizer"), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="runs on cuda, not on cpu"):
        check_fit(backend, Strategy.parse(STRATEGY + ",bucket_cap_mb=5"), torch.device("cpu"))
    assert STRATEGY in {one.strategy for one in backend.variants_on("cuda")}
    assert STRATEGY not in {one.strategy for one in backend.variants_on("cpu")}
    assert backend.variants_on("mps") == ()


class Pretended:
    """FairScale's engine for CUDA, under a name that says that it may run on CPU."""

    @hookimpl
    def shardkit_describe(self) -> Backend:
        variants = (Variant(strategy="pretended", summary="", shards=frozenset({"parameters"})),)
        return Backend(name="pretended", summary="", variants=variants, precisions=frozenset({"fp32", "fp16"}))

    @hookimpl
    def shardkit_prepare(self, model: nn.Module, optimizer: Any, strategy: Strategy) -> Any:
        from shardkit_fairscale._parameters import build

        from tests.plugins._streams import pretend

        pretend()
        return build(model, optimizer, strategy)


class Branches(nn.Module):
    """Uses one of two layers, or both; of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 7), nn.Linear(5, 1)

    def forward(self, x: Tensor, names: str) -> Tensor:
        return torch.stack([getattr(self, name)(x).square().mean() for name in names]).sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def life(folder: str) -> dict[str, Any]:
    shardkit.register(Pretended(), "pretended")
    found: dict[str, Any] = {}
    model = mlp()
    with shardkit.prepare(model, adamw(model), "pretended:max_grad_norm=0.1") as session:
        ranks = session.world_size
        found["trained"] = train(session, 4)
        found["norm"] = session.grad_norm
        found["held"] = [value.numel() for value in model.parameters()]
        state = session._engine.stepper.state  # type: ignore[union-attr]
        found["state"] = sum(entry["exp_avg"].numel() for entry in state.values())
        session.save(folder)
        found["longer"] = train(session, 2, first=4)
        session.load(folder)
        found["again"] = train(session, 2, first=4)
        with session.evaluate() as whole:
            # As often as this rank likes.
            for _ in range(session.rank):
                whole(batch(0, 0))
            found["whole"] = {name: value.clone() for name, value in whole.state_dict().items()}
    found["given back"] = {name: value.clone() for name, value in model.state_dict().items()}
    found["left"] = [sorted(vars(value)) for value in model.parameters()] + [sorted(vars(model)) == sorted(vars(mlp()))]

    branches = Branches()
    with shardkit.prepare(branches, adamw(branches), "pretended:accumulate=2") as session:
        for index in range(3):
            for micro in range(2):
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * index + 2 * micro + session.rank))
                # A rank uses one layer, and another one the other way round; the second step leaves one out.
                names = "b" if index == 1 else "ab" if session.rank else "ba" if micro else "a"
                step(session, session.model(x, names))
        found["branches"] = session.full_weights()

    loaded = mlp()
    with shardkit.prepare(loaded, adamw(loaded), "pretended") as session:
        train(session, 1)
        with pytest.raises(UnsupportedError, match="full_weights"):
            loaded.state_dict()
        loaded.load_state_dict(mlp(seed=9).state_dict())
        found["loaded"] = session.full_weights()
    assert ranks == session.world_size
    return found


@cache
def lived(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run(life, str(Path(folder) / "checkpoint"), processes=ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_trains_as_one_process_does_and_gives_the_module_back(ranks: int) -> None:
    model, longer = mlp(), mlp()
    expected = train_alone(model, adamw(model), 4, ranks, max_norm=0.1)
    end = train_alone(longer, adamw(longer), 6, ranks, max_norm=0.1)
    for found in lived(ranks):
        assert_close(found["trained"], expected, 2e-6)
        assert found["norm"] == lived(ranks)[0]["norm"]
        for key in ("longer", "again", "whole", "given back"):
            assert_close(found[key], end, 1e-5)
        assert all(torch.equal(found["again"][name], value) for name, value in found["longer"].items())
        assert found["left"] == [[], [], [], [], True]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_its_runs_of_weights_and_state_between_windows(ranks: int) -> None:
    sizes = [value.numel() for value in mlp().parameters()]
    for found in lived(ranks):
        assert found["held"] == [-(-size // ranks) for size in sizes]
    assert sum(found["state"] for found in lived(ranks)) == sum(sizes)


def test_ranks_may_use_different_parameters_in_another_order() -> None:
    model = Branches()
    optimizer = adamw(model)
    for index in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(2):
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * index + 2 * micro + rank))
                names = "b" if index == 1 else "ab" if rank else "ba" if micro else "a"
                (model(x, names) / 4).backward()
        optimizer.step()
    for found in lived(2):
        assert_close(found["branches"], dict(model.state_dict()), 2e-6)


def test_weights_that_are_loaded_after_prepare_hold() -> None:
    for found in lived(3):
        assert_close(found["loaded"], dict(mlp(seed=9).state_dict()), 0)


def test_its_footprint_is_runs_between_windows_and_whole_weights_within() -> None:
    from shardkit_fairscale._footprint import FullyShardedFootprint

    held = FullyShardedFootprint(ModelSize((ParameterSize("w", (3, 5), 4, True, True),), 2))
    assert (held.held.parameters, [item.shape for item in held.stepped()]) == (32, [(8,)])
    held.forward(["w"])
    assert held.held.parameters == 92
    held.ready("w", 60, last=True)
    assert held.step() == 120 - 0
    assert (held.held.parameters, held.held.gradients) == (32, 0)
