"""A rank is killed in the midst of a save: the checkpoint before or the new one is there, whole, and nothing else."""

from __future__ import annotations

import json
import random
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardkit
from shardkit._random import seed_everything
from shardkit.checkpoints import checkpoints, latest
from shardkit.checkpoints._read import Reader
from shardkit.errors import LaunchError
from shardkit.testing import run
from shardkit.testing.cases._models import train
from tests.checkpoints._moments import Fate, Record, die, dies_after, watched

ANY = "any time"


class Kill(NamedTuple):
    """Which rank dies, in what kind of save, and when: at a moment of a kind, or after so many seconds."""

    rank: int
    moment: str
    number: int
    behind: str
    seconds: float
    background: bool


def begun(strategy: str) -> shardkit.Session:
    """Return a session of a model with dropout, buffers and sizes that don't divide, from the same seed each time."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 15), nn.Dropout(0.5), nn.BatchNorm1d(15), nn.Linear(15, 8))
    return shardkit.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shardkit.Strategy.parse(strategy))


def never_killed(strategy: str, folder: Path, steps: int) -> tuple[list[str], float]:
    """Save after every step, keeping all; return the moments of such a save that removes another, and its seconds."""
    with begun(strategy) as session:
        for step in range(steps):
            train(session, 1, first=step)
            session.save(folder, keep=None)
        session.save(folder.with_name("measured"))
        start, record = time.perf_counter(), Record()
        with watched(record):
            session.save(folder.with_name("measured"))
        return record.moments, time.perf_counter() - start


def lives_until(strategy: str, folder: Path, copy: Path, kill: Kill | None) -> int:
    """Go on from the last checkpoint, write what was loaded to ``copy``, train a step, and die saving it."""
    session = begun(strategy)
    session.load(folder, missing_ok=True)
    if session.steps:
        session.save(copy)
    train(session, 1, first=session.steps)
    if kill is None or kill.rank != session.rank:
        session.save(folder, wait=kill is None or not kill.background)
        steps = session.steps
        if kill is not None:
            train(session, 1, first=steps)
        session.close()
        return steps
    if kill.moment == ANY:
        dies_after(kill.seconds)
    with watched(Fate(kill.moment, kill.number, kill.behind, die)):
        session.save(folder, wait=not kill.background)
        train(session, 1, first=session.steps)
        session.close()
    die()
    raise AssertionError("a dead rank goes on")


def plan(moments: list[list[str]], seconds: float, kills: int, seed: int) -> Iterator[Kill]:
    """Draw when to die: about the rename, then at any moment of each stage of a save in turn, and at any time."""
    chance = random.Random(seed)
    yield Kill(0, "before rename", 0, "", 0, False)
    yield Kill(0, "after rename", 0, "", 0, False)
    for number in range(kills - 2):
        rank, background = chance.randrange(len(moments)), chance.random() < 0.3
        # Rank 0 alone publishes and removes.
        stage = ("removing", "writing", "finishing", "beginning", ANY)[number % 5]
        found = moments[0 if stage == "removing" else rank]
        writing = found.index("before pwrite")
        written = len(found) - found[::-1].index("after pwrite")
        renamed = found.index("after rename") if "after rename" in found else len(found)
        if stage == ANY:
            yield Kill(rank, ANY, 0, "", chance.uniform(0, seconds), background)
            continue
        behind, places = {
            "beginning": ("", range(writing + 1)),
            "writing": ("before pwrite", range(writing + 1, written)),
            "finishing": ("before pwrite", range(written, renamed)),
            "removing": ("after rename", range(renamed + 1, len(found))),
        }[stage]
        place = chance.choice(places)
        begin = found.index(behind) + 1 if behind else 0
        before = found[begin:place].count(found[place])
        yield Kill(0 if stage == "removing" else rank, found[place], before, behind, 0, background)


def told(path: Path) -> dict[str, Any]:
    """Return all bytes of a checkpoint, but for the time, and its place among those of its directory."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    for key in ("number", "saved", "checksum"):
        del manifest[key]
    return {"manifest": manifest, **{file.name: file.read_bytes() for file in path.glob("*.safetensors")}}


def survives(strategy: str, folder: Path, kills: int, seed: int) -> list[str]:
    """Die so many times, each time going on from what is there; return what each death left."""
    whole, place = folder / "whole", folder / "killed"
    measured = run(never_killed, strategy, whole, kills + 2, timeout=120)
    seconds = max(taken for _, taken in measured)
    deaths = []
    step = 0
    for number, kill in enumerate(plan([moments for moments, _ in measured], seconds, kills, seed)):
        where = f"kill {number} under {strategy} (seed {seed}): {kill}"
        copy = folder / f"copy-{number}"
        with pytest.raises(LaunchError, match=r"SIGKILL|[Cc]onnection") as death:
            run(lives_until, strategy, place, copy, kill, timeout=60)
        if step:
            # What the processes had loaded, weights and optimizer, is what they write again.
            assert told(latest(copy) or copy) == told(whole / f"step-{step:08d}"), f"{where}: {death.value}"
        found = checkpoints(place)
        for path in found:
            with Reader(path) as reader:
                list(reader.verify_all())
            assert told(path) == told(whole / path.name), where
        steps = [int(path.name[-8:]) for path in found]
        # Those before it are such as a killed rank didn't come to remove; the next save does.
        assert steps == sorted(steps), where
        assert max(steps, default=0) in (step, step + 1), where
        if kill.moment != ANY and kill.rank == 0:
            # It is the rename that makes it visible.
            assert (step + 1 in steps) == (kill.behind == "after rename" or kill.moment == "after rename"), where
        others = [path.name for path in place.iterdir() if path not in found]
        assert all(re.match(r"\.(lock$|partial-|discarded-)", name) for name in others), where
        deaths.append(f"{kill}: {'new' if step + 1 in steps else 'old'}")
        step = max(steps, default=0)
    assert run(lives_until, strategy, place, folder / "copy", None, timeout=60) == [step + 1] * 2
    assert sorted(path.name for path in place.iterdir()) == [".lock", f"step-{step + 1:08d}"]
    assert told(place / f"step-{step + 1:08d}") == told(whole / f"step-{step + 1:08d}")
    return deaths


@pytest.mark.parametrize(("backend", "kills"), [("ddp", 5), ("fairscale", 3)])
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint_or_the_new_one(
    backend: str, kills: int, tmp_path: Path
) -> None:
    assert len(survives(backend, tmp_path, kills, seed=1)) == kills


@pytest.mark.slow
def test_ranks_killed_twelve_times_under_each_strategy_leave_whole_checkpoints(strategy: str, tmp_path: Path) -> None:
    """120 deaths over the ten strategies."""
    deaths = survives(strategy, tmp_path, 12, seed=zlib.crc32(strategy.encode()))
    print(strategy, *deaths, sep="\n  ")
    assert len(deaths) == 12
