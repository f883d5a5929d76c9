"""``shardkit conformance``: what came of the suite, for people, for machines and as a badge."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from shardkit.cli import main
from shardkit.errors import InputError
from shardkit.testing._badge import check_badge, write_badge
from shardkit.testing._conformance import Conformance, Verdict
from shardkit.testing._report import show
from tests.testing.test_suite import PATHS

RIGHT = Verdict("test_case[mine-c01]", "mine", "right")
REFUSED = Verdict("test_case[mine-sparse]", "mine", "refused", "backend 'mine' can't")
SKIPPED = Verdict("test_case[mine-fp16]", "mine", "skipped", "backend 'mine' doesn't declare precision 'fp16'")
FAILED = Verdict(
    "test_case[mine-c02]", "mine", "failed", "backend 'mine': C02\n  what it did: 0.5", "0.5", "0.75", "a#b"
)


def found(*verdicts: Verdict) -> Conformance:
    return Conformance("mine", "distribution shardkit-mine 1.2", 12.34, verdicts, "2026-01-31", {"torch": "2.13.0"})


def test_the_command_runs_the_suite_and_tells_what_fails(tmp_path: Path) -> None:
    command = ["-m", "shardkit.cli", "conformance", "planted", "--leave-out", "*=not asked here", "--json"]
    command += ["--strategies", "planted:fault=none,planted:fault=no-state"]
    command += ["--badge", str(tmp_path / "badge.svg"), "--output", str(tmp_path / "found.json")]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, [*PATHS, *filter(None, sys.path)]))}
    script = f"import sys; from shardkit.cli import main; sys.argv[1:] = {command[2:]!r}; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "found.json").read_text())
    assert (told["backend"], told["distribution"]) == ("planted", "distribution shardkit-planted 1.0")
    assert told["passed"] is False
    whole, broken = (told["strategies"][f"planted:fault={fault}"] for fault in ("none", "no-state"))
    assert whole["failed"] == 0
    assert whole["right"] >= 8
    assert whole["skipped"] > 190
    assert broken["failed"] > 0
    assert {test["strategy"] for test in told["tests"] if test["kind"] == "failed"} == {"planted:fault=no-state"}
    failed = next(test for test in told["tests"] if test["kind"] == "failed")
    assert failed["page"] == "docs/conformance.md#checkpoints"
    assert failed["did"]
    assert "wrong" in (tmp_path / "badge.svg").read_text()


def test_json_counts_and_lists_what_is_not_simply_right() -> None:
    told = found(RIGHT, REFUSED, SKIPPED).as_dict()
    assert told["passed"] is True
    assert told["strategies"] == {"mine": {"right": 1, "refused": 1, "skipped": 1, "failed": 0}}
    assert [test["kind"] for test in told["tests"]] == ["refused", "skipped"]
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("verdicts", [(RIGHT, FAILED), (SKIPPED,), ()])
def test_a_failure_or_nothing_that_ran_is_no_pass(verdicts: tuple[Verdict, ...]) -> None:
    assert not found(*verdicts).passed


def test_a_badge_is_a_picture_or_what_a_service_reads(tmp_path: Path) -> None:
    write_badge(found(RIGHT, REFUSED, SKIPPED), tmp_path / "b.svg")
    assert ElementTree.parse(tmp_path / "b.svg").getroot().get("aria-label") == (
        "shardkit: 1 right, 1 refused, 1 skipped"
    )
    write_badge(found(RIGHT, FAILED), tmp_path / "b.json")
    told = json.loads((tmp_path / "b.json").read_text())
    assert (told["schemaVersion"], told["message"], told["isError"]) == (1, "1 of 2 wrong", True)


def test_the_terminal_shows_rows_failures_and_reasons() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    show(found(RIGHT, FAILED, SKIPPED), console)
    text = console.export_text()
    assert "distribution shardkit-mine 1.2" in text
    assert "what it did: 0.5" in text
    assert "skipped 1: backend 'mine' doesn't declare precision 'fp16'" in text
    assert "1 of 3 failed, in 12 s" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no backend is named 'nowhere'"),
        (["ddp", "--badge", "badge.png"], "a badge is a picture, .svg"),
        (["ddp", "--badge", "no/such/badge.svg"], "no directory"),
        (["ddp", "--output", "no/such/found.json"], "no directory"),
        (["ddp", "--leave-out", "c01"], "PATTERN=REASON, not 'c01'"),
        (["ddp", "--strategies", "ddp:overlap=false"], "declares ddp, and not 'ddp:overlap=false'"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["conformance", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_a_badge_goes_where_it_can_be_written(tmp_path: Path) -> None:
    check_badge(None)
    check_badge(tmp_path / "badge.svg")
    with pytest.raises(InputError, match="no directory"):
        check_badge(tmp_path / "none" / "badge.json")
