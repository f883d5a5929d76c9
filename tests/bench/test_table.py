"""The table of a benchmark: who is compared, in which order they run, and what is computed of what was timed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit import Workload, _registry
from shardkit._registry import _manager
from shardkit.bench import Bench, Row, Trial, Trials, Watcher, _table, bench
from shardkit.bench._arms import Arm, arms
from shardkit.bench._table import _Asked, _Measured
from shardkit.errors import BackendNotFoundError, InputError, OutOfMemoryError, StrategyError, TrialError
from tests.test_cli import of_session, wait_for
from tests.tools import _faulty

SLEEP = 0.01
"""Seconds that a sample takes at least: to train, and twice that to evaluate."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the backends ``faulty``, ``absent`` (its library is missing) and ``broken`` (exits at import) on the path."""
    folder = _faulty.write(tmp_path_factory.mktemp("backends"))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in ("faulty", "absent"):
        _manager().unregister(name=f"backend {name}")
        sys.modules.pop(f"their_{name}", None)


def sleepy() -> Workload:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(SLEEP * len(batch))
        return model(batch).square().mean()  # type: ignore[no-any-return]

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.ones(size, 8)

    def generate(model: nn.Module, batch: Tensor) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        time.sleep(2 * SLEEP * len(batch))
        return model(batch)  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, optimizer, loss, batches, generate, lambda batch: 3 * len(batch))


class Heard(Watcher):
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.parts = 0

    def plan(self, parts: int) -> None:
        self.parts = parts

    def begin(self, what: str) -> None:
        self.begun.append(what)

    def end(self, what: str) -> None:
        self.ended.append(what)


HEARD = Heard()


@pytest.fixture(scope="module")
def found(faulty: None) -> Bench:
    return bench(
        sleepy,
        ["faulty:mode=die", "absent", "faulty", "ddp"],
        batch=12,
        items=1000,
        evaluation_items=160,
        steps=2,
        repeats=1,
        watcher=HEARD,
    )


def test_the_baseline_is_first_and_each_strategy_comes_once(found: Bench) -> None:
    assert [row.strategy for row in found.rows] == ["ddp", "faulty:mode=die", "absent", "faulty"]


def test_speeds_are_of_all_ranks_and_no_faster_than_the_samples_allow(found: Bench) -> None:
    for row in (found.rows[0], found.rows[3]):
        assert row.status == "measured"
        assert (row.batch, row.trials) == (12, 1)
        assert row.step_seconds is not None
        assert row.samples_per_second is not None
        # Two ranks side by side.
        assert row.step_seconds.low > 12 * SLEEP
        assert row.samples_per_second.high < 2 / SLEEP
        assert row.samples_per_second.median == pytest.approx(2 * 12 / row.step_seconds.median)
        assert row.tokens_per_second is not None
        assert row.tokens_per_second.median == pytest.approx(3 * row.samples_per_second.median)
        assert row.train_seconds == pytest.approx(1000 / row.samples_per_second.median)
    # Of the baseline two runs, of the other one, each of two steps.
    counts = [row.step_seconds.count for row in found.rows if row.step_seconds is not None]
    assert counts == [4, 2]


def test_an_evaluation_generates_for_a_bounded_number_of_samples(found: Bench) -> None:
    row = found.rows[0]
    assert row.evaluation_note == ""
    assert row.evaluation_samples_per_second is not None
    assert row.evaluation_samples_per_second.high < 2 / (2 * SLEEP)
    assert row.evaluation_samples_per_second.count == 2
    assert row.evaluation_seconds == pytest.approx(160 / row.evaluation_samples_per_second.median)


def test_what_fails_or_is_missing_is_a_row_and_the_rest_goes_on(found: Bench) -> None:
    died, absent = found.rows[1:3]
    assert died.status == "failed"
    assert "rank 1" in died.note
    assert died.samples_per_second is None
    assert absent.status == "missing"
    assert 'pip install "no-such-library>=1.2"' in absent.note
    assert found.exit_code == 1


def test_the_baseline_runs_twice_and_tells_the_noise(found: Bench) -> None:
    assert len(found.noise) == 1
    assert found.noise[0] > 0
    assert HEARD.begun == ["ddp", "faulty:mode=die", "faulty"] + [
        f"{name}, round 1 of 1" for name in ("ddp", "faulty", "ddp")
    ]
    assert len(HEARD.ended) == len(HEARD.begun)
    assert HEARD.ended[:3:2] == ["ddp: batch 12", "faulty: batch 12"]


def test_results_say_what_they_hold_for(found: Bench) -> None:
    settings = {"workload": "sleepy", "batch": 12, "memory": None, "processes": 2, "steps": 2, "repeats": 1}
    assert {name: found.settings[name] for name in settings} == settings
    assert found.versions["torch"] == torch.__version__
    assert found.hardware["cores"] == os.cpu_count()
    assert found.date.endswith("+00:00")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "say how much memory a rank may take, such as '24GiB', or else the batch"),
        ({"batch": 2, "memory": "1GiB"}, "say how much memory a rank may take, such as '24GiB', or else the batch"),
        ({"batch": 0}, "batch is a whole number from 1 on, not 0"),
        ({"batch": 2, "repeats": 0}, "repeats is a whole number from 1 on, not 0"),
        ({"batch": 2, "steps": True}, "steps is a whole number from 1 on, not True"),
        ({"batch": 2, "evaluation_items": -1}, "evaluation items is a whole number from 0 on, not -1"),
        ({"memory": "much"}, "reads a number and a unit"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_runs(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        bench("mlp", **changed)


def names(found: list[Arm]) -> list[tuple[str, str, str]]:
    return [(arm.row.strategy, arm.row.precision, arm.row.status) for arm in found]


def test_every_variant_is_compared_with_the_first_that_shards_nothing(faulty: None) -> None:
    found = names(arms([], [], None, 1, "cpu"))
    # Before it in the order of names comes one that can't run.
    assert found[0] == ("ddp", "fp32", "measured")
    assert ("absent", "fp32", "missing") in found
    assert ("broken", "fp32", "failed") in found
    assert ("deepspeed:stage=3", "fp32", "measured") in found
    assert len(found) == len(set(found))


def test_a_variant_that_shards_is_no_baseline_though_it_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = _registry.claims()
    monkeypatch.setattr(_registry, "claims", lambda: {name: claims[name] for name in ("fairscale", "ddp")})
    assert [arm.row.strategy for arm in arms([], [], None, 1, "cpu")][:2] == ["ddp", "fairscale"]
    monkeypatch.setattr(_registry, "claims", lambda: {"fairscale": claims["fairscale"]})
    assert arms(["fairscale:shard=optimizer"], [], None, 1, "cpu")[0].row.strategy == "fairscale:shard=optimizer"


def test_strategies_are_crossed_with_precisions_and_one_that_is_not_to_be_had_is_refused(faulty: None) -> None:
    found = arms(["faulty", "ddp"], ["fp32", "fp16"], None, 3, "cpu")
    assert names(found) == [
        ("ddp", "fp32", "measured"),
        ("faulty", "fp32", "measured"),
        ("faulty", "fp16", "refused"),
        ("ddp", "fp16", "measured"),
    ]
    assert found[2].row.note == "backend 'faulty' trains in bf16 or fp32, not in fp16"
    assert found[3].strategy is not None
    assert (found[3].strategy.precision, found[3].strategy.accumulate) == ("fp16", 3)
    assert found[3].row.name == "ddp in fp16"


def test_a_strategy_keeps_its_own_precision_and_another_baseline_can_be_had() -> None:
    found = arms(["deepspeed:stage=2,precision=bf16"], [], "fairscale", 1, "cpu")
    assert names(found) == [("fairscale", "fp32", "measured"), ("deepspeed:stage=2", "bf16", "measured")]


@pytest.mark.parametrize(
    ("strategies", "precisions", "baseline", "error", "said"),
    [
        (["dpp"], [], None, BackendNotFoundError, "dpp"),
        (["ddp:accumulate=2"], [], None, StrategyError, "use --accumulate"),
        (["ddp:precision=bf16"], ["fp32"], None, StrategyError, "sets 'precision', and so does --precisions"),
        (["ddp"], ["fp8"], None, StrategyError, "'precision' is one of"),
        (["ddp"], [], "absent", InputError, "the baseline 'absent' can't run: .*no-such-library"),
    ],
)
def test_wrong_strategies_are_refused(
    faulty: None, strategies: list[str], precisions: list[str], baseline: str | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        arms(strategies, precisions, baseline, 1, "cpu")


def asked(**changes: Any) -> _Asked:
    values: dict[str, Any] = {
        "trials": Trials("mlp", processes=2),
        "batch": 4,
        "budget": None,
        "accumulate": 1,
        "items": 100,
        "evaluation_items": 10,
        "steps": 1,
        "repeats": 3,
        "watcher": Watcher(),
    }
    return _Asked(**{**values, **changes})


def measured(*strategies: str) -> list[_Measured]:
    return [_Measured(arm) for arm in arms(list(strategies), [], "ddp", 1, "cpu")]


def test_rounds_go_there_and_back_between_two_runs_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def time_one(asked: _Asked, one: _Measured, turn: int) -> None:
        ran.append(one.arm.row.strategy)
        one.speeds.setdefault(turn, []).append(1.0)
        if one.arm.row.strategy == "deepspeed:stage=1" and turn == 1:
            one.tell(status="failed", note="it failed")

    monkeypatch.setattr(_table, "_find_batch", lambda asked, one, estimate, baseline: one.tell(batch=4))
    monkeypatch.setattr(_table, "_time", time_one)
    _table._run(asked(), measured("fairscale", "deepspeed:stage=1"))
    there = ["ddp", "fairscale", "deepspeed:stage=1", "ddp"]
    assert ran == [*there, *reversed(there), "ddp", "fairscale", "ddp"]


def test_a_row_is_over_the_baseline_round_for_round() -> None:
    base, other = measured("fairscale")
    base.tell(batch=8, peak_memory=(100, 80))
    other.tell(batch=12, peak_memory=(50, 60))
    # The machine got slower by half and by half again: in each round the other is twice as fast, but for one.
    base.speeds = {0: [8.0, 8.0], 1: [4.0, 4.0], 2: [2.2, 1.8]}
    other.speeds = {0: [16.0], 1: [8.0], 2: [6.0]}
    base.step_seconds, other.step_seconds = [2.0, 4.0, 8.0], [1.5, 3.0, 4.0]
    row = _table._row(asked(), other, base)
    assert row.speed_ratio is not None
    assert (row.speed_ratio.median, row.speed_ratio.high, row.speed_ratio.count) == (2.0, 2.5, 3)
    assert (row.batch_ratio, row.memory_ratio) == (1.5, 0.6)
    assert row.samples_per_second is not None
    assert row.samples_per_second.median == 12 * 2 / 3.0
    assert row.samples_per_second.low == 12 * 2 / 3.5
    assert row.train_seconds == 100 / 8.0
    accumulated = _table._row(asked(accumulate=3), other, base)
    assert accumulated.samples_per_second is not None
    assert accumulated.samples_per_second.median == 3 * 8.0


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def searched(monkeypatch: pytest.MonkeyPatch, error: Exception, *, baseline: bool = False) -> Row:
    """Return the row of a strategy whose search ends with an error."""
    monkeypatch.setattr(_table, "find_max_batch", raising(error))
    one = measured("fairscale")[1]
    _table._find_batch(asked(batch=None, budget=2**30), one, None, baseline=baseline)
    return one.arm.row


def test_a_search_that_finds_nothing_says_so_as_the_row_of_2021_did(monkeypatch: pytest.MonkeyPatch) -> None:
    row = searched(monkeypatch, OutOfMemoryError("not even a batch of 1 fits; what would fit: x", 5))
    assert (row.status, row.outcome) == ("out of memory", "out of memory at batch 1")
    assert row.note == "not even a batch of 1 fits; what would fit: x"
    row = searched(monkeypatch, TrialError("batch 4: rank 1 died\nTraceback", 1, "Traceback", 4))
    assert (row.status, row.note, row.details) == ("failed", "batch 4: rank 1 died", "Traceback")


def test_a_workload_that_the_baseline_refuses_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    error = InputError("it ignores the size")
    assert searched(monkeypatch, error).status == "failed"
    with pytest.raises(InputError, match="it ignores the size"):
        searched(monkeypatch, error, baseline=True)


def test_a_timed_run_out_of_memory_is_a_failure_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(4, 1, None, "out of memory", note="8 MiB could not be allocated")
    monkeypatch.setattr(Trials, "run", lambda *_, **__: trial)
    one = measured("fairscale")[1]
    one.tell(batch=4)
    _table._time(asked(), one, 0)
    assert one.arm.row.status == "failed"
    assert one.arm.row.note == (
        "batch 4: out of memory in a timed run, which has no budget: 8 MiB could not be allocated"
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardkit", "bench", *arguments], capture_output=True, text=True)


def test_bad_input_is_exit_code_2() -> None:
    for arguments, said in (
        (("mlp",), "say how much memory"),
        (("mpl", "--batch", "2"), "no workload is named 'mpl': did you mean 'mlp'"),
        (("mlp", "--batch", "2", "--strategies", "dpp"), "dpp"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


@pytest.mark.slow
def test_the_command_finds_the_largest_batch_and_writes_all_files(tmp_path: Path) -> None:
    done = run(
        *("t5-tiny", "--memory", "60MiB", "--strategies", "ddp,fairscale", "--steps", "2", "--repeats", "1"),
        *("--eval-items", "8", "--json", "--output", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ddp, fairscale = told["rows"]
    # 0.8 million parameters are worth a few samples.
    assert 1 <= ddp["batch"] < fairscale["batch"]
    assert ddp["batch_ratio"] == 1
    assert fairscale["batch_ratio"] == fairscale["batch"] / ddp["batch"]
    assert max(ddp["peak_memory"]) < 70 * 2**20
    assert 2 <= ddp["trials"] <= 6
    assert ddp["evaluation_seconds"] > 0
    assert ddp["tokens_per_second"]["median"] == pytest.approx(72 * ddp["samples_per_second"]["median"])
    assert told["command"].startswith("shardkit bench t5-tiny --memory 60MiB")
    assert {path.name for path in tmp_path.iterdir()} >= {"bench.json", "bench.csv", "bench.html"}
    assert json.loads((tmp_path / "bench.json").read_text()) == told


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the processes of a session from /proc")
@pytest.mark.parametrize("phase", ["batch", "round 1"])
def test_ctrl_c_leaves_no_process_behind(phase: str) -> None:
    command = [sys.executable, "-m", "shardkit", "bench", "mlp", "--strategies", "ddp,fairscale", "--repeats", "50"]
    process = subprocess.Popen(
        [*command, "--batch", "4"] if phase == "round 1" else [*command, "--memory", "1GiB"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        if phase == "round 1":
            assert process.stderr is not None
            while b"round 1" not in process.stderr.readline():
                assert process.poll() is None
        wait_for(lambda: len(forkers(process.pid)) > 1)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        wait_for(lambda: not of_session(process.pid) and not forkers(process.pid))
    finally:
        for left in of_session(process.pid):
            os.kill(left, signal.SIGKILL)
        process.communicate()


def forkers(command: int) -> list[int]:
    """Return the process that forks a command's ranks, and the ranks: they have a session of their own."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                told = (folder / "cmdline").read_bytes().split(b"\0")
                if b"shardkit.bench._serve" in told and str(command).encode() in told:
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def test_rows_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Row("a", "fp32", "measured").batch = 3  # type: ignore[misc]
