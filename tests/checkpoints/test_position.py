"""The place in the data moves with a checkpoint, also to ranks of another number that split it otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import shardkit
from shardkit.errors import InputError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd

SAMPLES = 48


def loader(session: shardkit.Session, rows: int | None, *, shuffle: bool = False) -> Any:
    """Return this rank's part of 48 numbers, in micro-batches of ``rows``; None: of 12 / world size."""
    data = torch.arange(float(SAMPLES))
    sampler: Any = DistributedSampler(data, session.world_size, session.rank, shuffle=shuffle, seed=3)  # type: ignore[arg-type]
    return DataLoader(data, rows or 12 // session.world_size, sampler=sampler)  # type: ignore[arg-type]


def taken(session: shardkit.Session, windows: Any, steps: int | None = None) -> list[float]:
    """Train to the end of a pass, or some steps, and return the numbers that all ranks saw, in order of steps."""
    seen = []
    for window in windows:
        for numbers in window:
            seen += sorted(session.gather(numbers).tolist())
            session.backward(session.model(numbers))
        session.step()
        if steps is not None and session.steps == steps:
            break
    return seen


def begun(folder: Path, rows: int | None) -> list[float]:
    model = W(0)
    with shardkit.prepare(model, sgd(model, lr=0.0), "ddp") as session:
        seen = taken(session, session.windows(loader(session, rows, shuffle=True)), steps=3)
        session.save(folder)
    return seen


def continued(folder: Path, rows: int | None, again: bool = False, position: bool = True) -> Any:
    """Return what a pass sees from there, or what it is refused with; ``again``, saved and loaded once more before."""
    model = W(0)
    with shardkit.prepare(model, sgd(model, lr=0.0), "ddp") as session:
        session.load(folder, position=position)
        if again:
            session.save(folder.parent / "again")
            session.windows([])
            session.load(folder.parent / "again")
            session.windows([])
        try:
            return taken(session, session.windows(loader(session, rows, shuffle=True)))
        except InputError as error:
            return str(error)


@pytest.mark.parametrize("again", [False, True])
def test_other_ranks_see_what_is_left_of_a_pass_whatever_their_batches(tmp_path: Path, again: bool) -> None:
    folder = tmp_path / "same global batch"
    seen = run(begun, folder, None)[0]
    order = run(continued, folder, None, False, False, processes=1)[0]
    assert seen == order[:36]
    assert sorted(order) == list(range(SAMPLES))
    for size in (1, 3):
        left = run(continued, folder, None, again, processes=size)
        assert left == [order[36:]] * size
    assert sorted(run(continued, folder, 6, again, processes=1)[0]) == sorted(order[36:])


def test_other_ranks_that_cannot_take_up_equal_parts_are_refused(tmp_path: Path) -> None:
    run(begun, tmp_path / "c", 2)
    told = run(continued, tmp_path / "c", 5, processes=3)
    assert told[0] == told[1] == told[2]
    assert told[0] == (
        "the checkpoint's 2 ranks had used 6 micro-batches of this pass, of 2 samples each, which 3 ranks can't take "
        "up in equal parts of 5: load it with position=False to begin the pass anew, or load one that was saved "
        "between passes"
    )
    assert len(run(continued, tmp_path / "c", 4, processes=3)[0]) == SAMPLES - 12


def test_without_the_position_the_pass_begins_anew(tmp_path: Path) -> None:
    run(begun, tmp_path / "c", 2)
    assert sorted(run(continued, tmp_path / "c", 1, False, False, processes=3)[0]) == list(range(SAMPLES))


def listed(folder: Path, resume: bool, kind: str) -> Any:
    """Save behind two steps, or go on, with a loader that doesn't say how many samples it gives at a time."""
    model = W(0)
    with shardkit.prepare(model, sgd(model, lr=0.0), "ddp") as session:
        own = torch.arange(float(SAMPLES))[session.rank :: session.world_size]
        batches: Any = list(own.split(12 // session.world_size))
        if kind == "no batch size":
            batches = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        if not resume:
            taken(session, session.windows(batches), steps=2)
            session.save(folder)
            return None
        session.load(folder)
        try:
            return taken(session, session.windows(batches))
        except InputError as error:
            return str(error)


@pytest.mark.parametrize("kind", ["list", "no batch size"])
def test_a_loader_that_does_not_tell_its_samples_goes_on_with_as_many_ranks_only(tmp_path: Path, kind: str) -> None:
    run(listed, tmp_path / "c", False, kind)
    assert "how many samples those are can't be told" in run(listed, tmp_path / "c", True, kind, processes=1)[0]
    assert sorted(run(listed, tmp_path / "c", True, kind)[0]) == list(range(24, SAMPLES))


def ended(folder: Path, rows: int, resume: bool) -> Any:
    """Save within a pass's last step, of short micro-batches; or return the epoch and numbers of what comes next."""
    model = W(0)
    with shardkit.prepare(model, sgd(model, lr=0.0), "ddp") as session:
        if resume:
            session.load(folder)
        windows = session.windows(loader(session, rows))
        if resume:
            return windows.epoch, sorted(taken(session, windows))
        return taken(session, windows, steps=5), session.save(folder)


@pytest.mark.parametrize(("processes", "rows"), [(1, 4), (3, 7), (1, 64)])
def test_behind_the_last_step_of_a_pass_other_ranks_begin_the_next(tmp_path: Path, processes: int, rows: int) -> None:
    seen, _ = run(ended, tmp_path / "c", 5, False)[0]
    assert sorted(seen) == list(range(SAMPLES))
    assert run(ended, tmp_path / "c", rows, True, processes=processes)[0] == (1, list(range(SAMPLES)))
