"""The public cases that need processes of their own: fresh runs, other world sizes, and the launcher."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Strategy
from shardkit.errors import LaunchError
from shardkit.testing import run
from shardkit.testing.cases._models import Two, W, assert_close, sgd, step

SIZES = [1, 2, 3, 5, 7, 16, 31, 64, 100, 127, 128, 255, 256, 511, 777, 1024, 1500, 2047, 3000, 4096]


class Many(nn.Module):
    """Parameters of many sizes, used in an order of their own; a rank may dawdle on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Part(size) for size in SIZES])

    def forward(self, x: Tensor, dawdle: random.Random | None) -> Tensor:
        total = x.new_zeros(())
        for part in self.parts:
            if dawdle is not None:
                time.sleep(dawdle.random() / 500)
            total = total + part(x)
        return total


class Part(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.w * x[: len(self.w)]) - x[0]).square().mean()


def _train_many(strategy: str, seed: int | None) -> dict[str, Tensor]:
    model = Many()
    with shardkit.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), strategy) as session:
        dawdle = random.Random(seed) if seed is not None and session.rank == 1 else None
        for index in range(10):
            x = torch.randn(4096, generator=torch.Generator().manual_seed(10 * index + session.rank))
            step(session, session.model(x, dawdle))
        return session.full_weights()


@cache
def _many_under_ddp() -> dict[str, Tensor]:
    return run(_train_many, "ddp", None, processes=2)[0]


def test_c11_fresh_runs_in_which_a_rank_dawdles_have_the_same_bits(strategy: str) -> None:
    first, second = run(_train_many, strategy, 1, processes=2), run(_train_many, strategy, 2, processes=2)
    for name, value in first[0].items():
        assert all(torch.equal(value, weights[name]) for weights in (first[1], *second)), name
    assert_close(first[0], _many_under_ddp(), 2e-6)


def _norm(strategy: str) -> tuple[float, dict[str, Tensor]]:
    model = Two()
    with shardkit.prepare(model, sgd(model), Strategy.parse(f"{strategy}")) as plain:
        step(plain, plain.model(1.0))
        weights = plain.full_weights()
    model = Two()
    given = Strategy.parse(strategy)
    given = Strategy(given.backend, track_grad_norm=True, options=given.options)
    with shardkit.prepare(model, sgd(model), given) as session:
        step(session, session.model(1.0))
        return session.grad_norm, weights


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_c17_the_norm_does_not_grow_with_the_number_of_ranks(strategy: str, processes: int) -> None:
    for norm, weights in run(_norm, strategy, processes=processes):
        assert norm == pytest.approx(5.0, rel=1e-6)
        assert_close(torch.cat([weights["a"], weights["b"]]), [-0.3, -0.4])


def _train_one(strategy: str) -> Tensor:
    model = W(1)
    with shardkit.prepare(model, sgd(model), strategy) as session:
        step(session, session.model([session.rank + 1]))
        return session.full_weights()["w"]


def test_c81_what_was_trained_comes_back_from_a_launch(strategy: str) -> None:
    for weight in shardkit.launch(_train_one, strategy, processes=2, timeout=120):
        assert_close(weight, [0.85])


SCRIPT = """
import sys, torch, shardkit
sys.path.insert(0, {root!r})
from tests.test_public_processes import _train_one
for strategy in ("ddp", "fairscale", "deepspeed:stage=3"):
    assert torch.allclose(_train_one(strategy), torch.tensor([0.85]))
print("done")
"""


def test_c81_the_same_under_torchrun_one_strategy_after_another(tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    pytest.importorskip("deepspeed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_c82_four_launches_at_once_succeed_while_the_usual_port_is_taken() -> None:
    script = "import shardkit, os; print(shardkit.launch(lambda: int(os.environ['RANK']), processes=2))"
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            # Somebody else has it: as good.
            pass
        running = [
            subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        assert [process.communicate(timeout=100)[0].strip() for process in running] == ["[0, 1]"] * 4


def test_c82_a_port_that_the_user_set_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> Any:
        return os.environ["MASTER_PORT"]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        free.listen()
        with pytest.raises(LaunchError, match=r"port \d+, set by MASTER_PORT, is in use"):
            shardkit.launch(port)
    assert shardkit.launch(port, processes=2) == [os.environ["MASTER_PORT"]] * 2
