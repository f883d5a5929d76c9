"""However a search ends, no process and no file of it is left: a whole program runs it, and is ended in its midst."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import shardkit
from shardkit.bench import Listener

class Telling(Listener):
    def progress(self, steps, of):
        print("step", flush=True)

shardkit.find_max_batch("mlp", "ddp", memory="1GiB", steps=10**6, listener=Telling())
"""


def left_files(folder: Path) -> list[Path]:
    """Return what lies in a folder for temporary files, but for the one that torch makes for its compiler's cache."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def alive(folder: Path) -> list[int]:
    """Return the processes, but for zombies, whose temporary files are in a folder."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environment = Path("/proc", process, "environ").read_bytes()
            state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environment and state != "Z":
            found.append(int(process))
    return found


@pytest.mark.parametrize(
    "by",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
    ids=lambda by: by.name,
)
def test_a_search_that_is_ended_leaves_no_process_and_no_file(by: signal.Signals) -> None:
    # The path of pytest's own folder is longer than that of a user's.
    with tempfile.TemporaryDirectory() as folder:
        _end(by, Path(folder))


def _end(by: signal.Signals, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.readline() == "step\n", program.stderr.read()
    # The program, the process that forks, and two ranks.
    assert len(alive(tmp_path)) == 4
    assert list(tmp_path.glob("shardkit-bench-*"))
    program.send_signal(by)
    printed = program.communicate(timeout=30)[1]
    deadline = time.monotonic() + 15
    while (left := alive(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    while (files := left_files(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert files == []
    assert program.returncode != 0
    assert ("KeyboardInterrupt" in printed) == (by == signal.SIGINT)
