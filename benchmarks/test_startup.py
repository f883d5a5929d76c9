"""How long Python takes to import shardkit, and the command to print its help; neither loads torch.

Start-up is one thread that waits for nobody once its files are cached: the time is the processor's, so that what else
runs on the machine counts little.
"""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys

import pytest
from _measure import Quartiles, differences, replayed, report, tell

pytestmark = replayed

IMPORT_LIMIT = 0.050
"""Seconds that ``import shardkit`` may take over Python alone."""

HELP_LIMIT = 0.300
"""Seconds in which ``shardkit --help`` ends."""

ROUNDS = 21
MILLISECOND = 1e-3

IMPORT = "import shardkit"
HELP = """
import sys
from shardkit.cli import main
sys.argv = ["shardkit", "--help"]
sys.exit(main())
"""
TELL_OF_TORCH = """
import atexit, sys
atexit.register(lambda: print("torch" if "torch" in sys.modules else "no torch", file=sys.stderr))
"""

needs_command = pytest.mark.skipif(
    importlib.util.find_spec("shardkit.cli") is None, reason="this version of shardkit has no command"
)


def test_import(benchmark):
    """Importing shardkit takes at most IMPORT_LIMIT over Python alone."""
    bare, seconds = _times("pass", IMPORT)
    added = differences(seconds, bare)
    report(benchmark, seconds, added_seconds=added)
    _tell("import shardkit", seconds, added, IMPORT_LIMIT, "over Python alone")
    assert added.median <= IMPORT_LIMIT


@needs_command
def test_help(benchmark):
    """``shardkit --help`` ends within HELP_LIMIT."""
    bare, seconds = _times("pass", HELP)
    added = differences(seconds, bare)
    report(benchmark, seconds, added_seconds=added)
    _tell("shardkit --help", seconds, added, HELP_LIMIT, "in all")
    assert Quartiles.of(seconds).median <= HELP_LIMIT


@pytest.mark.parametrize("program", [IMPORT, pytest.param(HELP, marks=needs_command)], ids=["import", "help"])
def test_loads_no_torch(program):
    """Neither has torch in ``sys.modules`` at its end."""
    done = subprocess.run([sys.executable, "-c", TELL_OF_TORCH + program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "no torch"


def _times(*programs: str) -> list[list[float]]:
    """Return seconds that Python takes for each program, one of each after the other, again and again."""
    seconds: list[list[float]] = [[] for _ in programs]
    for program in programs:
        _seconds(program)  # reads the files from disk
    for _ in range(ROUNDS):
        for place, program in enumerate(programs):
            seconds[place].append(_seconds(program))
    return seconds


def _seconds(program: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _tell(what: str, seconds: list[float], added: Quartiles, limit: float, of: str) -> None:
    tell(
        "start-up, ms",
        what=what,
        in_all=Quartiles.of(seconds).text(".0f", unit=MILLISECOND),
        over_python_alone=added.text(".0f", unit=MILLISECOND),
        limit=f"{limit / MILLISECOND:.0f} {of}",
    )
