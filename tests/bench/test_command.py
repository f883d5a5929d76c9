"""``shardkit max-batch``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardkit import bench
from shardkit.bench._largest import MaxBatch
from shardkit.bench._trials import Trial
from shardkit.cli import main
from shardkit.errors import OutOfMemoryError

MIB = 2**20
FOUND = MaxBatch(
    workload="mlp",
    strategy="ddp",
    memory=64 * MIB,
    processes=2,
    device="cpu",
    batch=4,
    accumulate=3,
    global_batch=24,
    trials=(
        Trial(4, 3, 64 * MIB, "fits", peak=(50 * MIB, 60 * MIB), base=(1, 2), step_seconds=(0.5, 0.25), seconds=7.0),
        Trial(5, 3, 64 * MIB, "out of memory", asked=MIB, seconds=2.0),
    ),
    leak=None,
    notes=("a note",),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the search answer at once, and keep what it was asked."""
    kept: list[Any] = []

    def search(workload: str, strategy: str, *, memory: str, listener: Any, **settings: Any) -> MaxBatch:
        kept.append((workload, strategy, memory, settings))
        if memory == "1MiB":
            raise OutOfMemoryError("not even one", 77)
        for trial in FOUND.trials:
            listener.begin(trial.batch, trial.accumulate)
            listener.progress(1, 4)
            listener.end(trial)
        return FOUND

    assert bench.find_max_batch is not None  # it is looked up when it is first asked for
    monkeypatch.setattr(bench, "find_max_batch", search)
    return kept


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["max-batch", *arguments])


def test_the_answer_and_the_trials_are_shown(asked: list[Any]) -> None:
    done = run("mlp", "--strategy", "ddp", "--memory", "64MiB", "--global-batch", "24")
    assert done.exit_code == 0, done.output
    assert "largest batch: 4 samples, 3 micro-batches a step, 24 samples a step" in done.stdout
    assert "60.0" in done.stdout
    assert "a note" in done.stdout
    assert "batch 4: fits in 7 s\nbatch 5: out of memory in 2 s" in done.stderr
    workload, strategy, memory, settings = asked[0]
    assert (workload, strategy, memory) == ("mlp", "ddp", "64MiB")
    assert (settings["global_batch"], settings["processes"], settings["steps"]) == (24, 2, 4)


def test_json_is_alone_on_stdout(asked: list[Any]) -> None:
    done = run("mlp", "--strategy", "ddp", "--memory", "64MiB", "--json")
    told = json.loads(done.stdout)
    assert (told["batch"], told["accumulate"], told["global_batch"]) == (4, 3, 24)
    assert [trial["outcome"] for trial in told["trials"]] == ["fits", "out of memory"]
    assert told["peak_memory"] == [50 * MIB, 60 * MIB]


def test_out_of_memory_at_one_sample_is_exit_code_1(asked: list[Any]) -> None:
    done = run("mlp", "--strategy", "ddp", "--memory", "1MiB")
    assert done.exit_code == 1
    assert "Out of memory: not even one" in done.stderr
    done = run("mlp", "--strategy", "ddp", "--memory", "1MiB", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"batch": 0, "error": "not even one", "asked": 77}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mlp", "--strategy", "ddp", "--memory", "much"], "memory reads a number and a unit"),
        (["mpl", "--strategy", "ddp", "--memory", "1GiB"], "did you mean 'mlp'"),
        (["mlp", "--strategy", "ddp:", "--memory", "1GiB"], "a strategy reads"),
        (["mlp", "--strategy", "ddp"], "Missing option '--memory'"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.output
