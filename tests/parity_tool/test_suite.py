"""``shardkit parity run``: strategies held against float64, by the distance of plain DDP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardkit import parity
from shardkit.cli import main
from shardkit.errors import InputError
from tests.parity_tool import toy


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(main, ["parity", "run", *arguments, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, json.loads(done.stdout)


def test_right_strategies_are_at_parity_with_distances_beside_the_baselines() -> None:
    code, report = run("gpt2-tiny", "--strategies", "ddp,deepspeed:stage=3", "--steps", "3", "--repeats", "1")
    assert code == 0
    assert report["summary"] == "2 strategies: 2 parity"
    [side] = report["sides"]
    plain = side["baseline"]["distances"]
    assert 0 < plain["weights"] < 1e-4
    for row in report["rows"]:
        assert (row["verdict"], row["before"]["runs"]) == ("parity", 1)
        for name, limit in (("loss", 1e-6), ("gradient_norm", 1e-5), ("weights", 1e-4)):
            assert 0 <= row["before"]["distances"][name] < limit
    # Under shardkit DDP computes what DDP by itself does.
    assert report["rows"][0]["before"]["distances"] == plain
    assert report["settings"]["steps"] == 3
    assert {"torch", "deepspeed", "python"} <= side["versions"].keys()


def test_from_python_too_each_runs_at_least_once() -> None:
    work = parity.Work("mlp")
    for call in (
        lambda: parity.run(work, repeats=0),
        lambda: parity.upgrade("torch==installed", "torch==installed", work, repeats=0),
        lambda: parity.bisect("torch", "2.12", "2.13", work, repeats=0),
    ):
        with pytest.raises(InputError, match="repeats is at least 1, not 0"):
            call()


def test_a_backend_that_is_wrong_is_not_at_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    # This version adds gradients up and divides by nothing.
    toy.make(tmp_path / "index", site, installed="2.0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    monkeypatch.syspath_prepend(site)
    code, report = run("mlp", "--strategies", "ddp,toy:mode=sum", "--steps", "3", "--repeats", "1")
    assert code == 1
    right, wrong = report["rows"]
    assert (right["verdict"], wrong["verdict"]) == ("parity", "no parity")
    assert "times as far from float64 as the baseline" in wrong["reason"]
    assert wrong["before"]["distances"]["gradient_norm"] > 0.5
