"""Real pairs of versions, told apart from pairs that don't differ. Needs the package index, and takes many minutes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shardkit.cli import main

pytestmark = pytest.mark.slow

STAGES = "deepspeed:stage=0,deepspeed:stage=2,deepspeed:stage=3"
OSS = "fairscale,fairscale:shard=optimizer"

# What each pair does: its exit code, and words of the reasons of some rows; "" where they are the same.
PAIRS = {
    # Clipping at norm 1 came as a default.
    ("deepspeed", "0.19.2", "0.19.3"): (1, {"deepspeed:stage=2 alone": "clipped to norm 1"}),
    # Stage 3 over gloo waited for the last of several gathers only.
    ("deepspeed", "0.19.7", "0.19.8"): (1, {"deepspeed:stage=3 alone": "race", "deepspeed:stage=2 alone": ""}),
    # On torch 2.13 stages 1 and 2 write into a view, which torch refuses.
    ("deepspeed", "0.18.6", "0.18.9"): (1, {"deepspeed:stage=2 alone": "Output 0 of Split is a view"}),
    ("fairscale", "0.3.8", "0.4.13"): (0, {"fairscale alone": "", "fairscale": ""}),
    ("fairscale", "0.4.12", "0.4.13"): (0, {"fairscale alone": "", "fairscale": ""}),
    # It leaves the interpreter when it is imported without pygit2.
    ("fairscale", "0.4.6", "0.4.7"): (2, {"fairscale": "SystemExit"}),
    ("fairscale", "0.4.7", "0.4.8"): (2, {"fairscale": "SystemExit"}),
}


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_of_versions_is_told_for_what_it_is(pair: tuple[str, str, str]) -> None:
    name, before, after = pair
    code, words = PAIRS[pair]
    strategies = STAGES if name == "deepspeed" else OSS
    sizes = ["--steps", "6", "--repeats", "1", "--timeout", "100"]
    arguments = ["parity", "upgrade", f"{name}=={before}", f"{name}=={after}", "--strategies", strategies, *sizes]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    report = json.loads(done.stdout)
    rows = {f"{row['strategy']}{' alone' if row['control'] else ''}": row for row in report["rows"]}
    for row, expected in words.items():
        if expected:
            assert expected in rows[row]["reason"]
            assert rows[row]["verdict"] in ("different", "could not run")
        else:
            assert rows[row]["verdict"] == "same", rows[row]["reason"]
    assert done.exit_code == code


def test_a_bisection_finds_the_version_that_brought_a_default() -> None:
    arguments = ["bisect", "deepspeed", "--good", "0.19.0", "--bad", "0.19.5", "--strategies", "deepspeed:stage=0"]
    done = CliRunner().invoke(main, ["parity", *arguments, "--steps", "4", "--repeats", "1", "--no-probe", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["last_same"], found["first"]) == (0, "0.19.2", "0.19.3")
    assert "clipped to norm 1" in found["summary"] or "gradient_clipping" in found["summary"]
