"""Upgrades and bisections of a third party's library, which has a version for each thing that can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from shardkit.cli import main
from tests.parity_tool import toy

SIZES = ["--workload", "mlp", "--steps", "3", "--repeats", "1", "--timeout", "25"]
ONE = ["--strategies", "toy:mode=same", "--no-probe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package index of the library's versions, the plugin beside it, and one cache for all tests."""
    made = tmp_path_factory.mktemp("toy")
    index, site = made / "index", made / "site"
    site.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        patch.setenv("SHARDKIT_CACHE", str(made / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.syspath_prepend(site)
        toy.make(index, site)
        yield made


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """One upgrade to the version that has all faults, as JSON; its files are in the folder."""
    # Twice without the probe, or once with it: a run that differs from itself shows in both.
    how = ["--repeats", "2", "--no-probe", "--output", str(folder / "report")]
    code, found = upgraded("installed", "2.0", *how)
    assert code == found["exit_code"] == 1
    return found


def shardkit(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["parity", *arguments])


def upgraded(before: str, after: str, *more: str) -> tuple[int, dict[str, Any]]:
    done = shardkit("upgrade", f"toylib=={before}", f"toylib=={after}", *SIZES, "--json", *more)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, json.loads(done.stdout)


def row_of(report: dict[str, Any], mode: str) -> dict[str, Any]:
    [found] = [row for row in report["rows"] if row["strategy"] == f"toy:mode={mode}"]
    return found


def test_the_sides_tell_their_versions(report: dict[str, Any]) -> None:
    assert [side["versions"]["toylib"] for side in report["sides"]] == ["1.0", "2.0"]
    assert [side["versions"]["torch"] for side in report["sides"]] == [torch.__version__] * 2


def test_what_changes_nothing_is_the_same(report: dict[str, Any]) -> None:
    row = row_of(report, "same")
    assert (row["verdict"], row["changed"]) == ("same", [])
    assert row["before"]["parity"]
    assert row["after"]["parity"]


def test_a_default_that_changed_is_named_with_both_values(report: dict[str, Any]) -> None:
    row = row_of(report, "default")
    assert row["verdict"] == "different"
    assert [(one["what"], one["a"], one["b"]) for one in row["changed"]] == [("Default.bucket", 16, 32)]
    assert "Default.bucket 16 -> 32" in row["reason"]


def test_a_sum_in_place_of_a_mean_is_named(report: dict[str, Any]) -> None:
    row = row_of(report, "sum")
    assert row["verdict"] == "different"
    assert row["comparison"]["diagnoses"][0]["name"] == "world size"
    assert row["comparison"]["parting"]["quantity"] == "gradient"
    assert "the gradients of the run after are the run before's times" in row["reason"]
    assert row["before"]["parity"]
    assert not row["after"]["parity"]


def test_a_run_that_differs_from_itself_is_a_race(report: dict[str, Any]) -> None:
    row = row_of(report, "race")
    assert row["verdict"] == "different"
    assert row["before"]["repeatable"]
    assert not row["after"]["repeatable"]
    assert "race" in row["reason"]


@pytest.mark.parametrize(
    ("mode", "stage", "words"), [("crash", "crash", "SIGSEGV"), ("error", "error", "ValueError: no such bucket")]
)
def test_a_run_that_fails_is_a_row_that_says_how(report: dict[str, Any], mode: str, stage: str, words: str) -> None:
    row = row_of(report, mode)
    assert row["verdict"] == "could not run"
    assert row["before"]["runs"] == 2
    assert row["after"]["failure"]["stage"] == stage
    assert words in row["after"]["failure"]["headline"]
    assert row["reason"].startswith("after: ")


def test_the_reports_are_written(report: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "report/report.json").read_text())["rows"] == report["rows"]
    cases = xml.etree.ElementTree.parse(folder / "report/report.xml").getroot().iter("testcase")
    assert any("toy:mode=race" in (case.get("name") or "") for case in cases)
    assert "<svg" in (folder / "report/report.html").read_text()


@pytest.mark.parametrize(
    ("version", "stage", "words"),
    [
        ("9.9", "install", "9.9"),
        ("1.2", "import", "SystemExit"),
        pytest.param("3.0", "import", "took over", marks=pytest.mark.slow),
    ],
)
def test_a_version_that_cant_be_had_is_a_row_that_says_how(folder: Path, version: str, stage: str, words: str) -> None:
    code, report = upgraded("1.0", version, *ONE)
    row = row_of(report, "same")
    assert (code, row["verdict"]) == (2, "could not run")
    assert row["before"]["runs"] == 1
    assert row["after"]["failure"]["stage"] == stage
    assert words in row["after"]["failure"]["headline"]


@pytest.mark.slow
def test_the_probe_finds_a_race_that_one_run_cant_show(folder: Path) -> None:
    code, report = upgraded("1.1", "2.0", "--strategies", "toy:mode=race")
    row = row_of(report, "race")
    assert (code, row["verdict"], row["after"]["runs"]) == (1, "different", 1)
    assert row["before"]["repeatable"]
    assert not row["after"]["repeatable"]


@pytest.mark.slow
def test_a_run_that_hangs_is_given_up_and_the_rest_still_runs(folder: Path) -> None:
    code, report = upgraded("1.0", "2.0", "--strategies", "toy:mode=hang,toy:mode=same", "--no-probe")
    assert code == 2
    assert row_of(report, "hang")["after"]["failure"]["stage"] == "timeout"
    assert row_of(report, "same")["verdict"] == "same"


@pytest.mark.slow
def test_a_version_that_changes_nothing_is_told_so_by_the_exit_code(folder: Path) -> None:
    code, report = upgraded("1.0", "1.1", *ONE)
    assert (code, row_of(report, "same")["verdict"]) == (0, "same")


_LOOP = """
import torch, shardkit

def train(strategy, record):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session, record(session):
        for step in range(3):
            torch.manual_seed(2 * step + session.rank)
            session.backward(session.model(torch.randn(3, 4)).square().mean())
            session.step()
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_is_upgraded_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(_LOOP)
    workload = ["--workload", f"{tmp_path / 'loop.py'}:train", "--repeats", "1", "--no-probe", "--json"]
    done = shardkit("upgrade", "toylib==1.0", "toylib==2.0", *workload, "--strategies", "toy:mode=sum")
    report = json.loads(done.stdout)
    [row] = report["rows"]
    assert (done.exit_code, row["verdict"]) == (1, "different")
    assert row["comparison"]["diagnoses"][0]["name"] == "world size"
    assert [side["baseline"] for side in report["sides"]] == [None, None]


def test_a_bisection_finds_the_first_that_differs_and_skips_what_cant_run(folder: Path) -> None:
    arguments = ["--good", "1.0", "--bad", "2.0", "--strategies", "toy:mode=sum", "--no-probe", *SIZES, "--json"]
    done = shardkit("bisect", "toylib", *arguments)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["first"], found["last_same"], found["skipped"]) == (0, "2.0", "1.1", ["1.2"])


@pytest.mark.slow
def test_a_bisection_between_equal_versions_says_that_there_is_nothing(folder: Path) -> None:
    done = shardkit("bisect", "toylib", "--good", "1.0", "--bad", "1.1", *ONE, *SIZES, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["first"]) == (1, None)


@pytest.mark.slow
def test_an_interrupted_upgrade_leaves_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "shardkit", "parity", "upgrade", "toylib==1.0", "toylib==2.0"]
    marker = f"toy-{time.time_ns()}"
    process = subprocess.Popen(
        [*command, "--workload", "mlp", "--steps", "3", "--strategies", "toy:mode=hang"],
        env={**os.environ, "TOY_MARKER": marker},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "before: toy:mode=hang: done" in line:
                break
        time.sleep(1)
        process.terminate()
        assert process.wait(20) == 143
    deadline = time.monotonic() + 20
    while left := _marked(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _marked(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["upgrade", "toylib>=1", "toylib==1.1"], "toylib==version"),
        (["upgrade", "toylib==1.0", "torch==installed"], "both sides must name the same packages"),
        (["upgrade", "toylib==1.0", "toylib==1.1", "--workload", "nothing"], "no workload is named 'nothing'"),
        (["upgrade", "toylib==1.0", "toylib==1.1", "--strategies", "toyy"], "did you mean 'toy'"),
        (["upgrade", "toylib==1.0", "toylib==1.1", "--strategies", "toy:accumulate=3"], "--accumulate"),
        (["bisect", "toylib", "--good", "1.0", "--bad", "1.0"], "the same version"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(folder: Path, arguments: list[str], words: str) -> None:
    done = shardkit(*arguments)
    assert done.exit_code == 2
    assert words in done.output
