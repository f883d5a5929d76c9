"""A checkpoint that isn't what was written is never loaded: the error names the file, and the checkpoint before."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.checkpoints import checkpoints, latest
from shardkit.errors import CheckpointError, DamageError
from shardkit.testing import run
from shardkit.testing.cases._models import W, step

STATE = {"seen": 3, "rows": torch.arange(5), "name": "Zoë"}


def opened() -> shardkit.Session:
    model = W(1)
    return shardkit.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), "ddp")


def values(session: shardkit.Session) -> list[Any]:
    """Return what a load changes, as plain values."""
    state = session.optimizer.state[session.model.w] if session.world_size == 1 else {}
    held = [value.tolist() for value in (*session.full_weights().values(), *state.values())]
    return [session.steps, held, random.getstate(), torch.get_rng_state().tolist()]


def saved(session: shardkit.Session, folder: Path, steps: int = 1) -> Path:
    """Return a checkpoint after so many more steps."""
    for _ in range(steps):
        step(session, session.model([float(session.steps + session.rank)]))
    return session.save(folder, state=STATE, keep=None)


def spoiled(path: Path, chance: random.Random, every: int) -> Iterator[tuple[Path, str]]:
    """Flip a bit in one byte of so many, and cut each file at some lengths; each damage is mended behind it."""
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in range(chance.randrange(every), len(data), every):
            bit = chance.randrange(8)
            with file.open("r+b") as opened:
                os.pwrite(opened.fileno(), bytes([data[at] ^ 1 << bit]), at)
                yield file, f"bit {bit} of byte {at}"
                os.pwrite(opened.fileno(), data[at : at + 1], at)
        for length in sorted({0, 7, 8, len(data) - 1, *(chance.randrange(len(data)) for _ in range(10))}):
            os.truncate(file, length)
            yield file, f"{length} bytes of {len(data)}"
            file.write_bytes(data)


def failure_of(session: shardkit.Session, folder: Path) -> CheckpointError | None:
    """Return what a load raises; None if it comes to the state that was saved."""
    try:
        state = session.load(folder)
    except CheckpointError as error:
        return error
    assert state is not None
    assert torch.equal(state.pop("rows"), STATE["rows"])
    assert state == {"seen": 3, "name": "Zoë"}
    return None


def refuses_all(folder: Path, seed: int, every: int) -> int:
    """Return how many kinds of damage were refused, each with the file's name, the session being as it was."""
    refused = 0
    with opened() as session:
        path = saved(session, folder, 2)
        manifest = json.loads((path / "checkpoint.json").read_text())
        session.load(path)
        as_saved = values(session)
        saved(session, folder / "elsewhere")
        before = values(session)
        for file, damage in spoiled(path, random.Random(seed), every):
            failure = failure_of(session, folder)
            if failure is not None:
                refused += 1
                assert str(file) in str(failure), f"{damage} of {file.name}: {failure}"
                assert isinstance(failure, DamageError) or "is of format" in str(failure)
                assert values(session) == before, f"{damage} of {file.name} changed the session"
                continue
            # What JSON reads as the same values, such as 1e5 and 1E5.
            assert file.name == "checkpoint.json", f"{damage} of {file.name} was loaded"
            assert json.loads(file.read_bytes()) == manifest, damage
            assert values(session) == as_saved
            session.load(folder / "elsewhere")
        assert session.load(folder) is not None
    return refused


def test_bits_that_are_flipped_and_files_that_are_cut_are_refused(tmp_path: Path) -> None:
    assert refuses_all(tmp_path, seed=3, every=47) > 400


@pytest.mark.slow
def test_a_bit_that_is_flipped_in_any_byte_is_refused(tmp_path: Path) -> None:
    assert refuses_all(tmp_path, seed=4, every=1) > 20_000


def spoil_one_by_one(folder: Path) -> list[tuple[str, str]]:
    """Return what this rank raises when it loads a checkpoint of both ranks, by the file that rank 0 spoils."""
    told = []
    with opened() as session:
        path = saved(session, folder)
        whole = values(session)
        chance = random.Random(5)
        for name in sorted(file.name for file in path.iterdir()):
            for _ in range(4):
                file, at = path / name, 0
                data = file.read_bytes()
                session.full_weights()
                if session.rank == 0:
                    at = chance.randrange(len(data))
                    file.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
                session.full_weights()
                with pytest.raises(CheckpointError) as caught:
                    session.load(folder)
                told.append((name, str(caught.value)))
                assert values(session) == whole
                session.full_weights()
                if session.rank == 0:
                    file.write_bytes(data)
        session.full_weights()
        session.load(folder)
    return told


def test_both_ranks_raise_the_same_whichever_read_the_damage(tmp_path: Path) -> None:
    first, second = run(spoil_one_by_one, tmp_path / "c", timeout=60)
    assert first == second
    assert len(first) == 20
    assert all(f"/{name}'" in message for name, message in first)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "ranks.safetensors"])
def test_files_of_another_checkpoint_of_the_same_shapes_are_refused(tmp_path: Path, name: str) -> None:
    with opened() as session:
        one, two = saved(session, tmp_path), saved(session, tmp_path)
        torch.rand(1)
        other = saved(session, tmp_path / "other")
        shutil.copy(other / name, two / name)
        with pytest.raises(DamageError, match=f"{name}' is damaged: bytes .* aren't those that were written"):
            session.load(tmp_path)
        session.load(one)
        assert session.steps == 1


def test_of_damage_to_the_last_checkpoint_the_error_names_the_one_before_it(tmp_path: Path) -> None:
    with opened() as session:
        first, second, third = (saved(session, tmp_path) for _ in range(3))
        for path, file in ((third, "weights.safetensors"), (second, "checkpoint.json")):
            (path / file).write_bytes((path / file).read_bytes()[:-3])
        hint = re.escape(f"The checkpoint before it is {str(first)!r}: to go on from there, load it by that path")
        with pytest.raises(DamageError, match=f"weights.safetensors' is damaged: .*{hint}"):
            session.load(tmp_path)
        session.load(first)
        assert session.steps == 1
        # It goes on behind those that are damaged, and they are in nobody's way.
        step(session, session.model([1.0]))
        again = session.save(tmp_path, keep=None)
        assert latest(tmp_path) == again
        session.load(tmp_path)


@pytest.mark.parametrize("damage", ["number", "all", "removed"])
def test_a_last_checkpoint_whose_number_is_lost_is_still_the_last(tmp_path: Path, damage: str) -> None:
    with opened() as session:
        for _ in range(3):
            path = saved(session, tmp_path)
        manifest = path / "checkpoint.json"
        text = manifest.read_text()
        if damage == "removed":
            manifest.unlink()
        else:
            manifest.write_text(text.replace('"number":3', '"number":1') if damage == "number" else "")
        assert latest(tmp_path) == path
        with pytest.raises(DamageError, match=r"checkpoint.json.*The checkpoint before it is .*step-00000002'"):
            session.load(tmp_path)


def test_of_the_only_checkpoint_nothing_before_it_is_named(tmp_path: Path) -> None:
    with opened() as session:
        (saved(session, tmp_path) / "weights.safetensors").unlink()
        with pytest.raises(DamageError, match=r"can't read '.*weights.safetensors': No such file or directory$"):
            session.load(tmp_path)


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def test_keep_retains_those_that_were_saved_last_also_after_going_back(tmp_path: Path) -> None:
    with opened() as session:
        for _ in range(4):
            step(session, session.model([1.0]))
            session.save(tmp_path, keep=3)
        assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
        session.load(tmp_path / "step-00000002")
        session.save(tmp_path, keep=3)
        assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000002.1"]
        step(session, session.model([1.0]))
        session.save(tmp_path, keep=3)
        assert names(tmp_path) == ["step-00000004", "step-00000002.1", "step-00000003.1"]
        session.save(tmp_path, keep=3)
        assert names(tmp_path) == ["step-00000002.1", "step-00000003.1", "step-00000003"]
        session.save(tmp_path, keep=None)
        assert len(names(tmp_path)) == 4
        session.save(tmp_path)
        (path,) = checkpoints(tmp_path)
        session.load(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", path.name]


def test_a_directory_under_a_name_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    with opened() as session:
        shutil.copytree(saved(session, tmp_path), tmp_path / "step-00000001-best")
        step(session, session.model([1.0]))
        session.save(tmp_path)
        assert names(tmp_path) == ["step-00000002"]
        session.load(tmp_path / "step-00000001-best")
        assert session.steps == 1
