"""Launching processes from Python, and what comes back of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.errors import LaunchError
from shardkit.testing.cases._models import W, sgd, step


def trained() -> tuple[int, torch.Tensor]:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        step(session, session.model([session.rank + 1]))
        return session.rank, session.full_weights()["w"]


def test_each_ranks_result_comes_back_in_order() -> None:
    results = shardkit.launch(trained, processes=2)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.allclose(weight, torch.tensor([0.85])) for _, weight in results)


def test_a_function_of_a_notebook_can_be_launched() -> None:
    factor = 3
    assert shardkit.launch(lambda value: value * factor * int(os.environ["RANK"]), 2, processes=2) == [0, 6]


def test_a_rank_that_fails_ends_the_others_and_shows_its_traceback() -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("a cause of its own")
        time.sleep(100)

    start = time.monotonic()
    with pytest.raises(LaunchError, match="a cause of its own") as caught:
        shardkit.launch(fail)
    assert time.monotonic() - start < 30
    assert caught.value.rank == 1
    assert "Traceback" in str(caught.value.traceback)


def test_a_rank_that_is_killed_is_named_with_the_signal() -> None:
    def die() -> None:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(LaunchError, match="rank 0 was ended by SIGKILL") as caught:
        shardkit.launch(die)
    assert caught.value.rank == 0


def test_a_rank_that_exits_without_a_result_is_named_with_its_code() -> None:
    with pytest.raises(LaunchError, match="rank 0 ended with exit code 7"):
        shardkit.launch(lambda: os._exit(7), processes=1)


def test_a_launch_that_takes_too_long_is_ended() -> None:
    with pytest.raises(LaunchError, match=r"rank 0, 1 of 2 did not end within 3 s"):
        shardkit.launch(lambda: time.sleep(100), timeout=3)


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(LaunchError, match="the function and its arguments can't be sent"):
        shardkit.launch(print, threading.Lock(), processes=1)
    with pytest.raises(LaunchError, match="the result, a lock, can't be sent back"):
        shardkit.launch(lambda: __import__("threading").Lock(), processes=1)
    with pytest.raises(LaunchError, match="at least 1, not 0"):
        shardkit.launch(trained, processes=0)


def test_a_port_that_the_user_chose_is_used_and_named_when_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=f"port {port}, set by MASTER_PORT, is in use"):
            shardkit.launch(trained)
    assert shardkit.launch(lambda: os.environ["MASTER_PORT"], processes=1) == [str(port)]


@pytest.mark.parametrize("port", ["abc", "70000", "-1"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(LaunchError, match=f"not '{port}'"):
        shardkit.launch(trained)


def test_four_launches_at_once_all_succeed() -> None:
    script = "import shardkit, os; print(shardkit.launch(lambda: int(os.environ['RANK']), processes=1))"
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=100)[0].strip() for process in running] == ["[0]"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel that ends a process with its parent: Linux")
def test_ranks_end_with_the_program_that_launched_them(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, time, shardkit\n"
        "def work():\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "    time.sleep(100)\n"
        "shardkit.launch(work, processes=2)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        program.kill()
        program.wait()
    wait_for(lambda: not any(runs(int(path.name)) for path in tmp_path.iterdir()))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in a minute"
        time.sleep(0.05)


SCRIPT = """
import sys, torch, shardkit
sys.path.insert(0, {root!r})
from shardkit.testing.cases._models import W, sgd, step
for strategy in ("ddp", "ddp"):
    model = W(1)
    with shardkit.prepare(model, sgd(model), strategy) as session:
        step(session, session.model([session.rank + 1]))
        weight = session.full_weights()["w"]
        assert torch.allclose(weight, torch.tensor([0.85])), weight
print("done")
"""


def test_the_same_script_runs_under_torchrun_one_session_after_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parent.parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_two_nodes_of_one_process_each_train_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parent.parent)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def node(rank: int) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        place = ["--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port), str(script)]
        return subprocess.Popen([*command, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for process in [node(0), node(1)]:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "done" in out
