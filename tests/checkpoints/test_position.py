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
from tests.cases._models import W, sgd

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
