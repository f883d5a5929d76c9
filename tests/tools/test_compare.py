"""The comparison judges each strategy by plain torch, and outlives what goes wrong in one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit import Strategy, workloads
from shardkit.errors import BackendNotFoundError, InputError, LaunchError, StrategyError
from shardkit.tools import _ranks, _trial, report
from shardkit.tools._trial import Trial
from shardkit.tools.compare import (
    TOLERANCE,
    Comparison,
    Row,
    _installed,
    _judged,
    _row,
    compare,
    samples_per_second,
    split_strategies,
)

STEPS, PROCESSES, BATCH, ACCUMULATE, MAX_NORM = 3, 2, 4, 2, 0.05
STRATEGIES = ("ddp", *(f"faulty:mode={mode}" for mode in ("wrong", "raise", "die")), "absent")


@pytest.fixture(scope="module")
def comparison(faulty_backends: Path) -> Comparison:
    return compare(
        "mlp",
        STRATEGIES,
        steps=STEPS,
        processes=PROCESSES,
        batch_size=BATCH,
        accumulate=ACCUMULATE,
        max_grad_norm=MAX_NORM,
        device="cpu",
        timeout=100,
    )


@pytest.fixture
def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.strategy: row for row in comparison.rows}


def test_the_reference_is_plain_torch_on_the_whole_global_batch(comparison: Comparison) -> None:
    workload = workloads.load("mlp")
    batches = workload.batches(BATCH)
    losses = []
    for _ in range(STEPS):
        parts = [next(batches) for _ in range(PROCESSES * ACCUMULATE)]
        whole = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = workload.loss(workload.model, whole)
        workload.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(workload.model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        workload.optimizer.step()
        losses.append(loss.item())
    assert comparison.reference.losses == pytest.approx(losses, rel=TOLERANCE)


def test_a_strategy_that_is_right_agrees(rows: dict[str, Row]) -> None:
    row = rows["ddp"]
    assert (row.status, len(row.losses)) == ("agrees", STEPS)
    assert row.loss_difference is not None
    assert row.loss_difference <= TOLERANCE
    assert row.weights_difference is not None
    assert row.weights_difference <= 1e-6


def test_a_learning_rate_that_is_off_by_a_thousandth_differs(rows: dict[str, Row]) -> None:
    row = rows["faulty:mode=wrong"]
    assert row.status == "differs"
    assert row.loss_difference is not None
    assert row.loss_difference > TOLERANCE
    assert row.weights_difference is not None
    assert row.weights_difference > 1e-6
    assert "the reference's is" in row.note


def test_a_strategy_that_raises_is_a_row_with_its_error_and_traceback(rows: dict[str, Row]) -> None:
    row = rows["faulty:mode=raise"]
    assert row.status == "failed"
    assert "ValueError: no room for it" in row.note
    assert "\n" not in row.note
    assert "their_faulty.py" in row.details
    assert "noise on stdout" in row.details


def test_a_rank_that_dies_is_a_row_that_names_it(rows: dict[str, Row]) -> None:
    row = rows["faulty:mode=die"]
    assert row.status == "failed"
    assert "rank 1" in row.note
    assert "exit code 3" in row.note


def test_another_precision_than_float32_is_not_judged(comparison: Comparison) -> None:
    row = Row("ddp", "reference", losses=[2 * loss for loss in comparison.reference.losses])
    trial = Trial([], [], 0)
    for precision, status in {"fp32": "differs", "bf16": "unjudged"}.items():
        judged = _judged(row, trial, comparison.reference, trial, Strategy("ddp", precision=precision))
        assert judged.status == status
        assert judged.loss_difference == pytest.approx(1.0)


def test_a_library_that_was_asked_for_and_is_missing_is_a_row_that_says_how_to_install_it(rows: dict[str, Row]) -> None:
    assert rows["absent"].status == "failed"
    assert 'pip install "no-such-library>=1.2"' in rows["absent"].note


def test_speed_and_memory_are_measured_on_every_rank(comparison: Comparison, rows: dict[str, Row]) -> None:
    assert (len(comparison.reference.peak_memory), len(rows["ddp"].peak_memory)) == (1, PROCESSES)
    assert rows["ddp"].samples_per_second is not None
    assert rows["ddp"].samples_per_second > 0
    # More than the model with gradients and momentum, less than what an import of torch takes.
    assert all(3 * 4 * 6792 < peak < 100 * 2**20 for peak in rows["ddp"].peak_memory)


def test_samples_are_those_of_all_ranks_and_micro_batches_and_warm_up_counts_in_updates() -> None:
    for accumulate in (1, 3):
        seconds = [10.0, 10.0, 0.5 * accumulate, 0.5 * accumulate, 0.5 * accumulate]
        assert samples_per_second(seconds, 4 * accumulate * 2) == 16.0
    assert samples_per_second([1.0, 1.0], 8) is None


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_c89_speed_counts_all_samples_and_leaves_out_the_first_updates(
    accumulate: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a clock of its own: half a second for a micro-batch, ten for each of the first two updates."""
    now, micro = 0.0, 0

    def learn(batch: int, last: bool) -> torch.Tensor:
        nonlocal now, micro
        now += 0.5 if micro // accumulate >= 2 else 10.0 / accumulate
        micro += 1
        return torch.tensor(1.0)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(_trial, "_now", lambda device: now)
    task = _trial.Task("mlp", 7, 2, 4, accumulate, None, None, "cpu", tmp_path)
    losses, seconds = _trial._train(task, iter(range(7 * accumulate)), accumulate, learn, torch.device("cpu"))
    assert seconds == pytest.approx([10.0] * 2 + [0.5 * accumulate] * 5)
    row = _row("x", [Trial(losses, seconds, 1)] * 2, task)
    assert row.samples_per_second == pytest.approx(4 * 2 / 0.5)


def test_what_differs_outweighs_what_could_not_run(comparison: Comparison) -> None:
    def code(*statuses: str) -> int:
        rows = [Row(status, status) for status in statuses]  # type: ignore[arg-type]
        return Comparison({}, {}, comparison.reference, rows).exit_code

    assert comparison.exit_code == 1
    assert code("agrees", "missing", "unjudged") == 0
    assert code("agrees", "failed") == 2
    assert code("failed", "differs", "agrees") == 1


def test_every_variant_runs_by_default_and_what_is_missing_or_broken_is_a_row(faulty_backends: Path) -> None:
    rows = {row.strategy: (row, strategy) for row, strategy in _installed({"accumulate": 2}, "cpu")}
    assert rows["ddp"][1] is not None
    assert rows["ddp"][1].accumulate == 2
    assert rows["absent"][0].status == "missing"
    assert rows["absent"][1] is None
    row, strategy = rows["fairscale:shard=parameters"]
    assert (row.status, strategy) == ("missing", None)
    assert "runs on cuda, not on cpu" in row.note
    assert "fairscale:shard=parameters" not in {
        row.strategy for row, strategy in _installed({}, "cuda") if strategy is None
    }
    assert rows["broken"][0].status == "failed"
    assert "SystemExit" in rows["broken"][0].note


def test_commas_separate_strategies_and_settings() -> None:
    assert split_strategies(["a,b:x=1,y=2,c", "d:z=3", "a"]) == ["a", "b:x=1,y=2", "c", "d:z=3"]
    assert split_strategies(["a, b"]) == ["a", "b"]
    assert split_strategies([]) == []


def test_what_holds_for_all_strategies_is_refused_in_one() -> None:
    with pytest.raises(StrategyError, match="use --accumulate"):
        compare("mlp", ["ddp:accumulate=2"])
    with pytest.raises(StrategyError, match="use --max-grad-norm"):
        compare("mlp", ["ddp:max_grad_norm=1"])


def test_bad_input_is_refused_before_anything_runs() -> None:
    with pytest.raises(BackendNotFoundError, match="did you mean 'ddp'"):
        compare("mlp", ["dpd"])
    with pytest.raises(StrategyError, match="has no option 'buckets'"):
        compare("mlp", ["ddp:buckets=1"])
    with pytest.raises(InputError, match="processes is at least 1, not 0"):
        compare("mlp", processes=0)
    with pytest.raises(StrategyError, match="'max_grad_norm' is above 0"):
        compare("mlp", max_grad_norm=-1.0)


def test_ranks_that_hang_end_when_the_time_is_up(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match="did not end within"):
        _ranks.run(time.sleep, 600, processes=2, timeout=1, workload="mlp", log=tmp_path / "log")
    assert time.monotonic() - start < 30


def test_the_json_holds_every_row_and_no_number_that_json_lacks(comparison: Comparison) -> None:
    told = json.loads(report.as_json(comparison), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert [row["strategy"] for row in told["strategies"]] == list(STRATEGIES)
    assert told["settings"]["tolerance"] == TOLERANCE
    assert told["versions"]["torch"] == torch.__version__
    assert told["reference"]["final_loss"] == comparison.reference.losses[-1]
    assert json.loads(report.to_json({"x": [float("nan"), float("inf"), 1.0]})) == {"x": [None, None, 1.0]}


def test_the_picture_is_drawn_also_where_nothing_ran(comparison: Comparison, tmp_path: Path) -> None:
    text, picture = report.write(comparison, tmp_path / "new" / "folder")
    assert json.loads(text.read_text())["exit_code"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    report.draw(Comparison(comparison.settings, {}, comparison.reference, []), tmp_path / "empty.png")
