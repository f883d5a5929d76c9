"""Under ``torchrun --max-restarts`` a killed run goes on from its last checkpoint, and ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import shardkit
from shardkit._random import seed_everything
from shardkit.testing import run
from tests.checkpoints._moments import Fate, die, watched

EPOCHS, STEPS = 3, 12
"""Four windows a pass: three of two micro-batches, and one of one."""

SCRIPT = """
import sys
from pathlib import Path

from tests.checkpoints.test_restart import restarted

restarted(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
"""

Death = tuple[int, int, str, int]
"""Which rank dies at which step: before its backward, or at a moment of its save, of which those of its kind count."""


def digest(values: dict[str, torch.Tensor]) -> str:
    """Return a checksum of all bits."""
    found = hashlib.sha256()
    for name, value in values.items():
        found.update(name.encode())
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else str(value).encode())
    return found.hexdigest()


def trains(strategy: str, folder: Path, death: Death | None) -> tuple[int, str]:
    """Train to the end, saving after every step, from the last checkpoint if there is one; die on the way if told.

    Returns at how many steps it began, and a checksum of the weights and of the schedule.
    """
    seed_everything(7)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Dropout(0.3), nn.Linear(13, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with shardkit.prepare(model, optimizer, shardkit.Strategy.parse(f"{strategy}:accumulate=2")) as session:
        schedule = LambdaLR(session.optimizer, lambda epoch: 1 / (1 + epoch))
        objects = {"schedule": schedule}
        rows = torch.randn(14, 7, generator=torch.Generator().manual_seed(session.rank))
        loader = DataLoader(TensorDataset(rows[:, :6], rows[:, 6:]), batch_size=2, shuffle=True)
        state = session.load(folder, objects=objects, missing_ok=True)
        begun, seen = session.steps, 0.0 if state is None else state["seen"]
        windows = session.windows(loader)
        for _ in range(windows.epoch, EPOCHS):
            for window in windows:
                mine = death is not None and death[:2] == (session.rank, session.steps + 1)
                for inputs, targets in window:
                    seen += float(inputs.sum())
                    if mine and death is not None and death[2] == "training":
                        die()
                    session.backward(nn.functional.mse_loss(session.model(inputs), targets))
                if session.step():
                    schedule.step()
                if mine and death is not None:
                    with watched(Fate(death[2], death[3], "", die)):
                        session.save(folder, objects=objects, state={"seen": seen}, wait=session.steps % 3 != 0)
                        session.save(folder, objects=objects, state={"seen": seen})
                    die()
                session.save(folder, objects=objects, state={"seen": seen}, wait=session.steps % 3 != 0)
        assert session.steps == STEPS
        told = {
            **session.full_weights(),
            "schedule": torch.tensor([*schedule.get_last_lr(), seen], dtype=torch.float64),
        }
    return begun, digest(told)


def restarted(strategy: str, folder: Path, deaths: str) -> None:
    """What torchrun starts, and starts again: each time another death, and none in the end."""
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    planned = json.loads(deaths)
    told = trains(strategy, folder / "c", tuple(planned[attempt]) if attempt < len(planned) else None)
    (folder / f"result-{os.environ['RANK']}-{attempt}.json").write_text(json.dumps(told))


def torchrun(strategy: str, folder: Path, deaths: list[Death], seconds: float) -> list[tuple[int, str]]:
    """Return what each rank told in the end."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={len(deaths)}", "--monitor-interval=0.1"]
    command += [str(script), strategy, str(folder), json.dumps(deaths)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-5000:]
    return [tuple(json.loads((folder / f"result-{rank}-{len(deaths)}.json").read_text())) for rank in range(2)]


def goes_on(strategy: str, folder: Path, deaths: list[Death], seconds: float) -> None:
    whole = run(trains, strategy, folder / "whole", None, timeout=60)
    assert [begun for begun, _ in whole] == [0, 0]
    resumed = torchrun(strategy, folder, deaths, seconds)
    step = deaths[-1][1]
    for (_, expected), (begun, found) in zip(whole, resumed, strict=True):
        assert begun in (step - 1, step), "it goes on from the last checkpoint, not from the beginning"
        assert found == expected


def test_a_run_killed_in_training_and_in_a_save_ends_with_the_same_bits(tmp_path: Path) -> None:
    goes_on("ddp", tmp_path, [(1, 6, "training", 0), (0, 9, "before rename", 0)], 120)


@pytest.mark.slow
def test_a_run_killed_at_random_ends_with_the_same_bits_under_each_strategy(strategy: str, tmp_path: Path) -> None:
    chance = random.Random(strategy)
    moments = ["training", "before pwrite", "within pwrite", "after fsync", "after rename", "before all_gather_object"]
    steps = sorted(chance.sample(range(2, STEPS + 1), 3))
    deaths = [(chance.randrange(2), step, chance.choice(moments), chance.randrange(3)) for step in steps]
    # Rank 1 renames nothing: it dies at the end of the save.
    goes_on(strategy, tmp_path, deaths, 300)
