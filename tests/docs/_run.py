"""Runs a program of the documentation on this rank, or process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import shardkit.testing
from tests.docs import setups
from tests.docs._blocks import ROOT, Program, write_files


def launch(program: Program, folder: Path) -> None:
    """Run a program in an empty folder, on as many fresh ranks as its setup says."""
    folder.mkdir(parents=True)
    write_files(program.blocks[0].page, folder)
    processes = setups.RANKS.get(program.setup, 2)
    if processes:
        shardkit.testing.run(run, program, folder, processes=processes, timeout=100)
    else:
        run(program, folder)


def run(program: Program, folder: Path) -> None:
    before, paths = os.getcwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        setup = getattr(setups, program.setup)()
        names = next(setup)
        for block in program.blocks:
            # So that a traceback shows the line of the page.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(ROOT / block.page), "exec"), names)
        next(setup, None)
    finally:
        os.chdir(before)
        sys.path[:] = paths


def set_up(setup: str, folder: Path) -> None:
    """Fill a folder with what a setup makes before it yields."""
    if setup != "nothing":
        shardkit.testing.run(_set_up, setup, folder, processes=1, timeout=100)


def _set_up(setup: str, folder: Path) -> None:
    os.chdir(folder)
    next(getattr(setups, setup)())
