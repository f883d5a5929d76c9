"""What can't be saved or loaded is refused with the same words on every rank, and the session goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoints import _directory
from shardkit.checkpoints._manifest import sealed
from shardkit.errors import CheckpointError, ShardkitError, StateError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd, step

Calls = dict[str, Callable[[], Any]]


def opened(model: nn.Module | None = None, strategy: str = "ddp") -> shardkit.Session:
    model = W(1) if model is None else model
    return shardkit.prepare(model, sgd(model), strategy)


def told(call: Callable[[], Any]) -> str:
    """Return the kind and the words of what a call raises."""
    try:
        call()
    except ShardkitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def prepare_folders(folder: Path) -> None:
    """Make what rank 0 finds: directories that hold no checkpoint, or one that isn't for this session."""
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "half" / ".partial-12345678").mkdir(parents=True)
    (folder / "half" / ".partial-12345678" / "weights.safetensors").write_bytes(b"half")
    (folder / "lost" / "step-00000007").mkdir(parents=True)
    (folder / "lost" / "step-00000007" / "weights.safetensors").write_bytes(b"half")
    for name, manifest in (("newer", sealed({}) | {"format": 99}), ("first", {"format": 1})):
        (folder / name).mkdir()
        (folder / name / "checkpoint.json").write_text(json.dumps(manifest))
    (folder / "first" / "rank-0-of-2.abcd.pt").write_bytes(b"")
    (folder / "rows").mkdir()
    (folder / "rows" / "rank-0-of-2.abcd.pt").write_bytes(b"")


def loads(session: shardkit.Session, folder: Path) -> Calls:
    rank = session.rank
    return {
        "load, missing": lambda: session.load(folder / "none"),
        "load, empty": lambda: session.load(folder / "empty"),
        "load, half written": lambda: session.load(folder / "half"),
        "load, without a manifest": lambda: session.load(folder / "lost"),
        "load, newer format": lambda: session.load(folder / "newer"),
        "load, format 1": lambda: session.load(folder / "first"),
        "load, format 1 without a manifest": lambda: session.load(folder / "rows", missing_ok=True),
        "load, file": lambda: session.load(folder / "file"),
        "load, file where nothing may be": lambda: session.load(folder / "file", missing_ok=True),
        "load, other model": lambda: session.load(folder / "other"),
        "load, other directories": lambda: session.load(folder / ("good", "other")[rank]),
        "load, other objects": lambda: session.load(folder / "good", objects={} if rank else {"a": Kept()}),
        "load, missing_ok on one rank": lambda: session.load(folder / "none", missing_ok=rank == 0),
        "load, position on one rank": lambda: session.load(folder / "good", position=rank == 0),
        "load, no path": lambda: session.load(None if rank else folder),  # type: ignore[arg-type]
        "load, object without load_state_dict": lambda: session.load(folder / "object", objects={"a": Kept()}),
        "load, object that isn't there": lambda: session.load(folder / "good", objects={"a": Kept()}),
        "load, objects that aren't a mapping": lambda: session.load(folder / "good", objects=[1]),  # type: ignore[arg-type]
    }


def saves(session: shardkit.Session, folder: Path, checkpoint: Path) -> Calls:
    rank, save = session.rank, session.save
    good = folder / "good"
    deep: dict[str, Any] = {"a": [1, {"b": object()}]}
    endless: list[Any] = []
    endless.append(endless)
    return {
        "save, file": lambda: save(folder / "file"),
        "save, below a file": lambda: save(folder / "file" / "below"),
        "save, into a checkpoint": lambda: save(checkpoint),
        "save, into one of format 1": lambda: save(folder / "first"),
        "save, keep": lambda: save(good, keep=0),
        "save, other directories": lambda: save(folder / f"{rank}"),
        "save, other keep": lambda: save(good, keep=rank + 1),
        "save, other wait": lambda: save(good, wait=rank == 0),
        "save, other objects": lambda: save(good, objects={f"a{rank}": Kept()}),
        "save, other state": lambda: save(good, state={} if rank else {"a": 1}),
        "save, no path": lambda: save(None if rank else good),  # type: ignore[arg-type]
        "save, object without state_dict": lambda: save(good, objects={"a": 1}),
        "save, objects that aren't a mapping": lambda: save(good, objects=[1]),  # type: ignore[arg-type]
        "save, names that aren't strings": lambda: save(good, state={1: 1}),  # type: ignore[dict-item]
        "save, what can't be held": lambda: save(good, state=deep),
        "save, what one rank can't hold": lambda: save(good, state={"a": 1 if rank == 0 else W}),
        "save, what holds itself": lambda: save(good, state={"a": endless}),
        "save, sparse": lambda: save(good, state={"a": torch.ones(2).to_sparse()}),
        "save, object whose state can't be held": lambda: save(good, objects={"a": Odd()}),
    }


class Kept:
    def state_dict(self) -> dict[str, Any]:
        return {}


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": [lambda: 0]}


def refused(folder: Path) -> dict[str, str]:
    """Return what each call raises on this rank, where a good checkpoint lies and the session goes on after each."""
    with opened(nn.Linear(1, 1)) as session:
        session.save(folder / "other")
        if session.rank == 0:
            prepare_folders(folder)
    found = {}
    with opened() as session:
        session.save(folder / "object", objects={"a": Kept()})
        checkpoint = session.save(folder / "good")
        for name, call in (loads(session, folder) | saves(session, folder, checkpoint)).items():
            found[name] = told(call)
            assert session.load(folder / "good") == {}
        step(session, session.model([session.rank + 1]))
        assert torch.allclose(session.full_weights()["w"], torch.tensor([0.85]))
        assert [path.name for path in (folder / "good").iterdir() if path.name != ".lock"] == [checkpoint.name]
        with opened(strategy="ddp") as second:
            found["save, two sessions"] = told(lambda: second.save(folder / "good"))
            session.close()
            assert second.save(folder / "good").name == "step-00000000.1"
    with opened(strategy="ddp:accumulate=2") as session:
        session.backward(session.model([1.0]))
        found["save, mid-window"] = told(lambda: session.save(folder / "good"))
        step(session, session.model([1.0]))
        session.save(folder / "good")
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(refused, tmp_path_factory.mktemp("refused"), timeout=60)


WORDS = {
    "load, missing": "CheckpointError: .*there is no checkpoint in '.*/none': it doesn't exist",
    "load, empty": "CheckpointError: .*there is no checkpoint in '.*/empty': it has no checkpoint.json and no step-",
    "load, half written": "CheckpointError: .*'.*/half': it holds only one that was never finished",
    "load, without a manifest": "DamageError: can't read '.*/step-00000007/checkpoint.json': No such file",
    "load, newer format": "CheckpointError: '.*/newer/checkpoint.json' is of format 99.*needs a newer shardkit",
    "load, format 1": "CheckpointError: '.*/first/checkpoint.json' is of format 1",
    "load, format 1 without a manifest": "CheckpointError: .*'.*/rows' holds a checkpoint of format 1",
    "load, file": "CheckpointError: .*'.*/file': it is a file, not a directory",
    "load, file where nothing may be": "CheckpointError: .*'.*/file': it is a file, not a directory",
    "load, other model": r"CheckpointError: .*has 'bias' \(1,\), 'weight' \(1, 1\) that.*has 'w' \(1,\) that",
    "load, other directories": r"MismatchError: .*\(load, directory\): rank 0: .*/good; rank 1: .*/other",
    "load, other objects": r"MismatchError: .*\(load, objects\): rank 0: \['a'\]; rank 1: \[\]",
    "load, missing_ok on one rank": r"MismatchError: .*\(load, missing_ok\): rank 0: True; rank 1: False",
    "load, position on one rank": r"MismatchError: .*\(load, position\): rank 0: True; rank 1: False",
    "load, no path": "InputError: rank 1: the directory is a path, not a NoneType",
    "load, object without load_state_dict": "CheckpointError: object 'a' is a Kept, without load_state_dict",
    "load, object that isn't there": "CheckpointError: the checkpoint has no object 'a'",
    "load, objects that aren't a mapping": "InputError: objects is a mapping by name, not a list",
    "save, file": "CheckpointError: can't save to '.*/file': it is a file, not a directory",
    "save, below a file": "CheckpointError: rank 0: can't write '.*/file/below': Not a directory",
    "save, into a checkpoint": "CheckpointError: '.*/step-00000000' is itself a checkpoint: save into the directory",
    "save, into one of format 1": "CheckpointError: '.*/first' is itself a checkpoint",
    "save, keep": "InputError: keep is how many checkpoints stay, from 1 on, or None for all, not 0",
    "save, other directories": r"MismatchError: .*\(save, directory\): rank 0: .*/0; rank 1: .*/1",
    "save, other keep": r"MismatchError: .*\(save, keep\): rank 0: 1; rank 1: 2",
    "save, other wait": r"MismatchError: .*\(save, wait\): rank 0: True; rank 1: False",
    "save, other objects": r"MismatchError: .*\(save, objects\): rank 0: \['a0'\]; rank 1: \['a1'\]",
    "save, other state": r"MismatchError: .*\(save, state\): rank 0: \['a'\]; rank 1: \[\]",
    "save, no path": "InputError: rank 1: the directory is a path, not a NoneType",
    "save, object without state_dict": "InputError: object 'a' is a int, without state_dict: plain values go in state",
    "save, objects that aren't a mapping": "InputError: objects is a mapping by name, not a list",
    "save, names that aren't strings": "InputError: the names in state are strings, not 1",
    "save, what can't be held": "CheckpointError: state/a/1/b is a builtins.object, and a checkpoint holds numbers",
    "save, what one rank can't hold": "CheckpointError: rank 1: state/a is a builtins.type",
    "save, what holds itself": "CheckpointError: state/a .*holds itself",
    "save, sparse": "CheckpointError: state/a is a tensor of torch.sparse_coo, which a checkpoint can't hold",
    "save, object whose state can't be held": "CheckpointError: objects/a/inner/0 is a builtins.function",
    "save, two sessions": "StateError: rank 0: another open session of this process saves to '.*/good'",
    "save, mid-window": "StateError: save in mid-window would lose the gradients of 1 of 2 micro-batches",
}


@pytest.mark.parametrize("name", WORDS)
def test_bad_input_is_refused_with_the_same_words_on_both_ranks(name: str, refusals: list[dict[str, str]]) -> None:
    assert refusals[0][name] == refusals[1][name]
    assert re.match(WORDS[name], refusals[0][name], re.DOTALL)


def test_every_refusal_has_its_words(refusals: list[dict[str, str]]) -> None:
    assert set(refusals[0]) == set(WORDS)


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_directory_that_is_read_only_is_named(tmp_path: Path, call: str) -> None:
    """As the root user, who may write everywhere, sees it: the file system's own refusal."""
    refusal = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "c"))
    with opened() as session:
        with (
            mock.patch.object(os, call, side_effect=refusal),
            pytest.raises(CheckpointError, match=f"can't write '{tmp_path}/c': Read-only file system"),
        ):
            session.save(tmp_path / "c")
        session.save(tmp_path / "c")


def first_job(folder: Path, turn: Path) -> None:
    """Save, and hold the directory until another job was refused."""
    with opened() as session:
        session.save(folder)
        (turn / "first has saved").touch()
        wait_for(turn / "second was refused")
        session.save(folder)
    (turn / "first has ended").touch()


def second_job(folder: Path, turn: Path) -> str:
    """Return what a save raises while another job holds the directory; save once it has ended."""
    with opened() as session:
        wait_for(turn / "first has saved")
        with mock.patch.object(_directory, "_LOCK_SECONDS", 0.3):
            found = told(lambda: session.save(folder))
        assert session.load(folder) == {}, "to read is no matter of the lock"
        # Both ranks are here once they have loaded.
        (turn / "second was refused").touch()
        wait_for(turn / "first has ended")
        session.save(folder)
    return found


def wait_for(path: Path) -> None:
    event = threading.Event()
    for _ in range(3000):
        if path.exists():
            return
        event.wait(0.01)
    raise AssertionError(f"{path.name} never came")


def test_of_two_jobs_that_save_to_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    (turn := tmp_path / "turn").mkdir()
    one = threading.Thread(target=run, args=(first_job, tmp_path / "c", turn), kwargs={"processes": 1, "timeout": 60})
    one.start()
    found = run(second_job, tmp_path / "c", turn, timeout=60)
    one.join()
    assert found[0] == found[1]
    assert re.match(r"StateError: rank 0: another job saves to '.*/c' \(process \d+ on .*\): give each job", found[0])
    (left,) = shardkit.checkpoints.checkpoints(tmp_path / "c")
    assert json.loads((left / "checkpoint.json").read_text())["number"] == 3


def test_a_directory_that_was_removed_and_made_anew_is_locked_anew(tmp_path: Path) -> None:
    with opened() as session, opened() as second:
        session.save(tmp_path / "c")
        (tmp_path / "c").rename(tmp_path / "moved")
        session.save(tmp_path / "c")
        with pytest.raises(StateError, match="another open session"):
            second.save(tmp_path / "c")
