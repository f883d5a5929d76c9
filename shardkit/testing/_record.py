"""Many cases in one launch of fresh ranks, and what came of each on every rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shardkit.errors import LaunchError, UnsupportedError
from shardkit.testing._ranks import run
from shardkit.testing._told import NOTHING, Told, told
from shardkit.testing.cases._models import Prepare
from shardkit.testing.cases._table import Run

CASE_SECONDS = 60
"""How long a case may take before its rank says where it hangs, and ends. Those that end take a few seconds."""

LAUNCHES = 6
"""How often the remaining cases are launched again after one took its ranks down."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case on one rank."""

    kind: Literal["right", "refused", "skipped", "wrong", "lost"]
    """``refused``: an UnsupportedError; ``skipped``: something isn't there; ``lost``: the rank ended, or hung."""
    message: str = ""
    """Of the refusal, or why it was skipped."""
    told: Told = NOTHING
    trace: str = ""


Outcomes = dict[str, list[Outcome]]
"""The outcome of each case, by its name, on each rank."""


def record(strategy: str, jobs: Mapping[str, Run], world_size: int = 2, folder: Path | None = None) -> Outcomes:
    """Run functions of the kind of cases under a strategy, one after the other on the same fresh ranks.

    One that takes its ranks down doesn't keep the others from running: they are launched again. ``folder`` is where
    they may write, each into a folder of its name, which is gone afterwards if none is given.
    """
    found: Outcomes = {}
    for _ in range(LAUNCHES):
        remaining = {name: job for name, job in jobs.items() if name not in found}
        if not remaining:
            break
        with tempfile.TemporaryDirectory(prefix="shardkit-cases-") as made:
            found |= _launch(strategy, remaining, world_size, Path(made), folder)
    lost = Outcome("lost", told=Told(f"{LAUNCHES} launches of ranks broke down before this case", "ranks that last"))
    return {name: found.get(name, [lost] * world_size) for name in jobs}


def _launch(strategy: str, jobs: Mapping[str, Run], world_size: int, made: Path, folder: Path | None) -> Outcomes:
    broke = ""
    try:
        # Each rank ends by itself if it hangs: this is for one that can't.
        timeout = CASE_SECONDS * len(jobs) + 60
        run(_run, strategy, dict(jobs), CASE_SECONDS, made, folder or made, processes=world_size, timeout=timeout)
    except LaunchError as error:
        broke = str(error)
    found: Outcomes = {}
    for index, name in enumerate(jobs):
        files = [_file(made, index, rank) for rank in range(world_size)]
        found[name] = [
            pickle.loads(file.read_bytes()) if file.exists() else _lost(made, rank, broke)
            for rank, file in enumerate(files)
        ]
        if not all(file.exists() for file in files):
            break
    return found


def _lost(made: Path, rank: int, broke: str) -> Outcome:
    stack = made / f"stack-{rank}"
    trace = stack.read_text() if stack.exists() else ""
    did = f"hung for {CASE_SECONDS} s" if "Timeout" in trace else f"lost the rank: {broke.partition(chr(10))[0]}"
    return Outcome("lost", told=Told(did, "an answer, or an error, on every rank"), trace=trace or broke)


def _run(strategy: str, jobs: Mapping[str, Run], seconds: float, made: Path, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    with open(made / f"stack-{rank}", "w") as stack:
        for index, (name, job) in enumerate(jobs.items()):
            # A hang inside a collective ends by no exception: only the process can.
            faulthandler.dump_traceback_later(seconds, exit=True, file=stack)
            # A library that collects garbage at each start need not walk through what earlier cases left to keep.
            gc.collect()
            gc.freeze()
            outcome = _outcome(job, Prepare(strategy, folder / name), rank)
            draft = made / f"draft-{rank}"
            draft.write_bytes(pickle.dumps(outcome))
            draft.rename(_file(made, index, rank))
        faulthandler.cancel_dump_traceback_later()


def _outcome(job: Run, prepare: Prepare, rank: int) -> Outcome:
    try:
        job(prepare, rank)
    except pytest.skip.Exception as error:
        return Outcome("skipped", str(error))
    except UnsupportedError as error:
        return Outcome("refused", str(error), told(error), traceback.format_exc())
    except (Exception, pytest.fail.Exception) as error:
        return Outcome("wrong", str(error), told(error), traceback.format_exc())
    return Outcome("right")


def _file(made: Path, index: int, rank: int) -> Path:
    return made / f"job-{index}-rank-{rank}"
