"""A save in the background: what is written is the state at the call, and what goes wrong is told at the next call."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardkit
from shardkit import _session
from shardkit._random import seed_everything
from shardkit.checkpoints import _write, checkpoints, latest
from shardkit.errors import CheckpointError
from shardkit.testing import run
from shardkit.testing.cases._models import train


def opened(strategy: str) -> shardkit.Session:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 8))
    return shardkit.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shardkit.Strategy.parse(strategy))


def told(path: Path) -> dict[str, Any]:
    """Return all bytes of a checkpoint, but for the time, and its place among those of its directory."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    for key in ("number", "saved", "checksum"):
        del manifest[key]
    return {"manifest": manifest, **{file.name: file.read_bytes() for file in path.glob("*.safetensors")}}


def held_up(until: threading.Event, moment: str = "_write_share") -> Any:
    """Have the writing of a save wait for an event."""
    original = getattr(_write.Writer, moment)

    def wait(self: Any, *arguments: Any) -> Any:
        assert until.wait(30)
        return original(self, *arguments)

    return mock.patch.object(_write.Writer, moment, wait)


def goes_on(strategy: str, folder: Path) -> None:
    """Save at once, and in the background while everything changes that was saved."""
    with opened(strategy) as session:
        train(session, 2)
        state = {"rows": torch.arange(6.0), "list": [1]}
        session.save(folder / "waited", state=state)
        go = threading.Event()
        with held_up(go):
            path = session.save(folder / "meanwhile", state=state, wait=False)
            assert not path.exists()
            assert latest(folder / "meanwhile") is None
            state["rows"].zero_()
            state["list"].append(2)
            train(session, 2, first=2)
            torch.rand(3)
            go.set()
            # A load waits for it first.
            assert session.load(folder / "meanwhile") == {"rows": mock.ANY, "list": [1]}
        assert session.steps == 2


def is_the_state_at_the_call(strategy: str, tmp_path: Path) -> None:
    run(goes_on, strategy, tmp_path)
    (waited,), (meanwhile,) = checkpoints(tmp_path / "waited"), checkpoints(tmp_path / "meanwhile")
    assert told(waited) == told(meanwhile)


@pytest.mark.parametrize("backend", ["ddp", "deepspeed:stage=3", "fairscale"])
def test_what_is_written_is_the_state_at_the_call_to_the_last_bit(backend: str, tmp_path: Path) -> None:
    is_the_state_at_the_call(backend, tmp_path)


@pytest.mark.slow
def test_what_is_written_is_the_state_at_the_call_under_each_strategy(strategy: str, tmp_path: Path) -> None:
    is_the_state_at_the_call(strategy, tmp_path)


def no_space(self: Any, partial: Path) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))


def fails_later(folder: Path) -> dict[str, str]:
    """Have rank 1 fail in the background; return what the next save, load and close raise."""
    found = {}
    calls: dict[str, Callable[[shardkit.Session], Any]] = {
        "save": lambda session: session.save(folder),
        "load": lambda session: session.load(folder),
        "close": lambda session: session.close(),
    }
    for name, call in calls.items():
        with opened("deepspeed:stage=1") as session:
            train(session, 1)
            before = session.save(folder)
            train(session, 1, first=1)
            with mock.patch.object(_write.Writer, "_write_share", no_space if session.rank else _write_share):
                session.save(folder, wait=False)
                train(session, 1, first=2)
                with pytest.raises(CheckpointError) as error:
                    call(session)
            found[name] = str(error.value)
            assert latest(folder) == before
            if name != "close":
                train(session, 1, first=3)
                assert session.load(folder) == {}
                assert session.steps == 1
                session.save(folder, wait=False)
        assert not list(folder.glob(".partial-*"))
    return found


_write_share = _write.Writer._write_share


def test_a_failure_is_raised_at_the_next_call_on_every_rank_and_the_session_goes_on(tmp_path: Path) -> None:
    first, second = run(fails_later, tmp_path / "c")
    assert first == second
    assert list(first) == ["save", "load", "close"]
    for message in first.values():
        assert re.match(
            r"the last save, in the background, failed: rank 1: can't write '.*\.partial-.*': No space left", message
        )


def one_after_another(folder: Path) -> list[str]:
    """Save again and again without waiting, each time from other weights; return what was there at each moment."""
    seen = []
    with opened("ddp") as session:
        for index in range(4):
            train(session, 1, first=index)
            session.save(folder, wait=False, keep=None)
            seen.append([path.name for path in checkpoints(folder)])
            running = [thread for thread in threading.enumerate() if thread.name == "shardkit-save"]
            assert len(running) <= 1, "two saves at a time"
    return seen


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    for seen in run(one_after_another, tmp_path / "c"):
        for index, names in enumerate(seen):
            # All before it are whole by then; it may be itself.
            assert names in ([f"step-{step + 1:08d}" for step in range(count)] for count in (index, index + 1))
    assert len(checkpoints(tmp_path / "c")) == 4


class _Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds up the bytes of what is copied or made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        result = function(*arguments, **(settings or {}))
        if isinstance(result, torch.Tensor) and "_to_copy" in str(function):
            self.bytes += result.numel() * result.element_size()
        return result


def copied(strategy: str, folder: Path) -> int:
    """Return how many bytes a save copies before training goes on."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    with shardkit.prepare(model, torch.optim.AdamW(model.parameters()), strategy) as session:
        session.backward(session.model(torch.ones(1, 256)).square().mean())
        session.step()
        with _Counted() as counted:
            session.save(folder, wait=False)
        return counted.bytes


@pytest.mark.parametrize("backend", ["ddp", "deepspeed:stage=3"])
def test_what_is_copied_is_what_this_rank_writes_and_no_more(backend: str, tmp_path: Path) -> None:
    whole = 3 * 4 * (256 * 256 + 256)
    copies = run(copied, backend, tmp_path / "c")
    # The random state of both ranks, and the counts of steps, are some KiB.
    assert whole <= sum(copies) < whole + 2**15
    assert max(copies) < 0.51 * whole + 2**15


EXITS = """
import sys
import torch
from torch import nn
import shardkit

model = nn.Linear(300, 300)
session = shardkit.prepare(model, torch.optim.Adam(model.parameters()), "ddp")
session.backward(session.model(torch.ones(1, 300)).sum())
session.step()
session.save(sys.argv[1], wait=False)
if sys.argv[2] == "error":
    raise SystemExit("the program fails")
"""


@pytest.mark.parametrize("end", [pytest.param("quiet", marks=pytest.mark.slow), "error"])
def test_a_program_that_ends_without_close_has_its_save_finished(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", EXITS, str(tmp_path), end]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (1 if end == "error" else 0), ended.stderr
    (path,) = checkpoints(tmp_path)
    with opened_linear() as session:
        session.load(tmp_path)
        assert session.steps == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", path.name]


def opened_linear() -> shardkit.Session:
    model = nn.Linear(300, 300)
    return shardkit.prepare(model, torch.optim.Adam(model.parameters()), "ddp")


def leaves_by_an_error(folder: Path) -> None:
    """Leave a session by an error, first on rank 0, while it writes."""
    go = threading.Event()
    short = mock.patch.object(_session, "_ERROR_SECONDS", 0.2)
    with held_up(go), short, suppress(ZeroDivisionError), opened("ddp") as session:
        session.save(folder, wait=False)
        threading.Timer(1.5, go.set).start()
        time.sleep(session.rank)
        raise ZeroDivisionError


def test_a_session_that_is_left_by_an_error_finishes_its_save(tmp_path: Path) -> None:
    run(leaves_by_an_error, tmp_path / "c")
    assert [path.name for path in checkpoints(tmp_path / "c")] == ["step-00000000"]
    assert not list((tmp_path / "c").glob(".partial*"))
