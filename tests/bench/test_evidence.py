"""What came of a trial, judged from what the ranks wrote and how they ended."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shardkit.bench._trial import Files, Record
from shardkit.bench._trials import Trial, _judge

MIB = 2**20
EMPTY = Trial(4, 1, 100 * MIB, "fits")


class Group:
    """Two ranks that ended."""

    def __init__(self, folder: Path) -> None:
        self.files = [Files(folder, rank) for rank in range(2)]
        self.ended: dict[int, dict[str, Any]] = {}

    def told(self, rank: int, outcome: str, at: float = 1.0, **more: Any) -> None:
        record = Record(outcome=outcome, time=at, **more)
        self.files[rank].record.write_text(json.dumps(dataclasses.asdict(record)))
        self.ended[rank] = {"code": 0, "resident": 0, "time": at}

    def died(self, rank: int, code: int, held: int = 0, at: float = 1.0, printed: str = "") -> None:
        self.files[rank].base.write_text(json.dumps({"base": 300 * MIB}))
        self.files[rank].log.write_text(printed)
        self.ended[rank] = {"code": code, "resident": 300 * MIB + held, "time": at}

    def judged(self, late: tuple[int, ...] = (), kills: int = 0) -> Trial:
        return _judge(EMPTY, self.files, self.ended, list(late), 5.0, kills)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


LOST = {"kind": "RuntimeError", "message": "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"}


def test_memory_that_one_rank_lacked_is_the_cause_of_what_the_others_say(group: Group) -> None:
    group.told(0, "error", at=0.5, **LOST)
    group.told(1, "out of memory", asked=5 * MIB)
    trial = group.judged()
    assert (trial.outcome, trial.rank, trial.asked, trial.note) == (
        "out of memory",
        1,
        5 * MIB,
        "5 MiB could not be allocated",
    )


def test_of_two_errors_the_one_that_is_no_lost_connection_is_the_cause(group: Group) -> None:
    group.told(0, "error", at=0.5, **LOST)
    group.told(1, "error", kind="ValueError", message="wrong\nand more")
    trial = group.judged()
    assert (trial.outcome, trial.rank, trial.note) == ("error", 1, "rank 1: ValueError: wrong")


def test_a_rank_that_died_is_the_cause_of_lost_connections(group: Group) -> None:
    group.told(0, "error", **LOST)
    group.died(1, -signal.SIGSEGV, held=50 * MIB)
    trial = group.judged()
    assert (trial.outcome, trial.rank) == ("died", 1)
    assert trial.grown == 50 * MIB


@pytest.mark.parametrize(
    ("code", "held", "printed", "kills", "outcome"),
    [
        (-signal.SIGKILL, 99 * MIB, "", 0, "died"),
        (-signal.SIGKILL, 0, "", 1, "out of memory"),
        (-signal.SIGSEGV, 89 * MIB, "", 0, "died"),
        (-signal.SIGSEGV, 91 * MIB, "", 0, "out of memory"),
        (-signal.SIGSEGV, 10 * MIB, "", 1, "died"),
        (
            -signal.SIGABRT,
            10 * MIB,
            "terminate called after throwing an instance of 'std::bad_alloc'",
            0,
            "out of memory",
        ),
        (-signal.SIGABRT, 10 * MIB, "double free or corruption", 0, "died"),
        (-signal.SIGTERM, 99 * MIB, "", 0, "died"),
        (3, 99 * MIB, "", 0, "died"),
        (0, 0, "", 0, "died"),
    ],
)
def test_a_death_is_for_want_of_memory_only_with_evidence(
    group: Group, code: int, held: int, printed: str, kills: int, outcome: str
) -> None:
    group.told(0, "error", **LOST)
    group.died(1, code, held=held, printed=printed)
    assert group.judged(kills=kills).outcome == outcome


def test_without_a_budget_a_crash_is_a_crash(group: Group) -> None:
    group.died(1, -signal.SIGSEGV, held=99 * MIB)
    group.told(0, "error", **LOST)
    trial = _judge(dataclasses.replace(EMPTY, budget=None), group.files, group.ended, [], 5.0, 0)
    assert trial.outcome == "died"


def test_ranks_that_were_ended_since_they_came_no_further_hang(group: Group) -> None:
    group.died(0, -signal.SIGKILL, printed="File train.py, line 7")
    group.died(1, -signal.SIGKILL)
    trial = group.judged(late=(0, 1))
    assert (trial.outcome, trial.rank) == ("hang", 0)
    assert "line 7" in trial.details


def test_a_refusal_keeps_its_kind_and_its_words(group: Group) -> None:
    for rank in range(2):
        group.told(rank, "refused", kind="UnsupportedError", message="not on this device")
    trial = group.judged()
    assert (trial.outcome, trial.kind, trial.note) == ("refused", "UnsupportedError", "not on this device")


def test_lost_connections_alone_are_an_error(group: Group) -> None:
    for rank in range(2):
        group.told(rank, "error", **LOST)
    assert group.judged().outcome == "error"


def test_a_trial_fits_if_it_does_on_all_ranks(group: Group) -> None:
    group.told(0, "fits", peak=3, reserved=4, base=5, held=[1, 2], in_use=[1, 1, 1], seconds=[0.1, 0.4])
    group.told(1, "fits", peak=6, reserved=7, base=8, held=[2, 3], in_use=[1, 1, 1], seconds=[0.2, 0.3])
    trial = group.judged()
    assert (trial.outcome, trial.peak, trial.reserved, trial.base) == ("fits", (3, 6), (4, 7), (5, 8))
    assert (trial.held, trial.step_seconds) == (((1, 2), (2, 3)), (0.2, 0.4))
