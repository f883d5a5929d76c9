"""What a Trainer's training does by itself, under the flags as in the library: docs/trainer-behaviour.md lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.transformers.behaviours import ALL, OPTIMIZERS
from tests.transformers.conftest import EVERY, Look, pairs, unlike
from tests.transformers.tiny import transformers

TRAINING = (
    "same_seed_twice",
    "another_seed",
    "model_made_by_a_function",
    "short_windows",
    "short_windows_without_token_counts",
    "no_clipping",
    "frozen_parameters",
    "own_optimizer_and_schedule",
    "own_optimizer_class",
    "schedules",
    "label_smoothing",
    "own_loss_function",
    "averaged_by_rank",
    "subclasses",
    "checkpointed_activations",
    "bf16",
    "noisy_embeddings",
    "compiled",
    "one_after_another",
    "trained_again",
)
DDP = "--strategy ddp"


def test_the_page_lists_every_behaviour() -> None:
    page = Path(__file__).parents[2] / "docs/trainer-behaviour.md"
    cells = [line.split("|")[2] for line in page.read_text().splitlines() if line.startswith("| ")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    # What is otherwise than in the library is told below the tables.
    assert listed == set(ALL) - {"fp16"}


@pairs(TRAINING)
def test_training_is_that_of_the_librarys_own_trainer(look: Look, name: str, flag: str) -> None:
    for expected, seen in zip(look("own", name), look(flag, name), strict=True):
        assert "error" not in expected
        assert unlike(expected, seen) == []


def test_the_same_seed_gives_the_same_training(look: Look) -> None:
    for seen in look(DDP, "same_seed_twice"):
        assert seen["equal"] is True
    assert unlike(look(DDP, "same_seed_twice")[0]["first"], look(DDP, "another_seed")[0]["first"])


def test_a_model_made_by_a_function_begins_anew(look: Look) -> None:
    assert all(seen["equal"] is True for seen in look(DDP, "model_made_by_a_function"))


def test_a_short_last_window_is_a_step_of_its_own(look: Look) -> None:
    seen = look(DDP, "short_windows")[0]
    # 22 samples are 6 micro-batches of 2 on each of 2 ranks: windows of 4 and of 2.
    assert [seen[name]["steps"] for name in ("epoch", "most", "half", "none")] == [2, 3, 3, 3]
    assert seen["epoch"]["epochs"] == [4 / 6, 1.0]


def test_every_schedule_moves_as_its_name_says(look: Look) -> None:
    seen = {name: found["rates"] for name, found in look(DDP, "schedules")[0].items()}
    assert set(seen) == {kind.value for kind in transformers.SchedulerType}
    assert seen["constant"] == [0.01] * 6
    assert seen["constant_with_warmup"] == [0.0] + [0.01] * 5
    assert seen["linear"] == pytest.approx([0.0, 0.01, 0.008, 0.006, 0.004, 0.002])
    assert len({tuple(rates) for rates in seen.values()}) == len(seen) - 1, "but that on a plateau is constant"


@pytest.mark.parametrize("flag", [DDP, *(pytest.param(flag, marks=pytest.mark.slow) for flag in EVERY if flag != DDP)])
def test_optimizers_that_a_backend_cant_split_are_refused_and_others_train(look: Look, flag: str) -> None:
    pieces = "deepspeed" in flag or "fsdp" in flag
    for expected, seen in zip(look("own", "optimizers"), look(flag, "optimizers"), strict=True):
        for name in OPTIMIZERS:
            if name == "adafactor" and pieces:
                assert "Adafactor gives something else on a piece" in seen[name]["error"]
            else:
                assert unlike(expected[name], seen[name]) == []


def test_checkpointed_activations_change_no_loss(look: Look) -> None:
    seen = look(DDP, "checkpointed_activations")[0]
    for name in ("new", "old", "reentrant"):
        assert unlike(seen["without"]["losses"], seen[name]["losses"]) == []


def test_bf16_is_no_fp32(look: Look) -> None:
    half, full = look(DDP, "bf16")[0]["losses"], look(DDP, "no_clipping")[0]["losses"]
    assert 1e-5 < abs(half[0] - full[0]) / full[0] < 1e-2


def test_fp16_trains_on_cpu_by_the_sessions_scale(look: Look) -> None:
    own, seen = look("own", "fp16")[0], look(DDP, "fp16")[0]
    full = look(DDP, "no_clipping")[0]["losses"][0]
    # The library's own trains in float32 there, and doesn't say so.
    assert own["losses"][0] == pytest.approx(full, rel=1e-6)
    assert 1e-6 < abs(seen["losses"][0] - full) / full < 1e-3
    # A step that overflowed doesn't count for the schedule.
    skipped = [at for at, norm in enumerate(seen["norms"]) if not abs(norm) < float("inf")]
    assert skipped
    assert [seen["rates"][at + 1] for at in skipped] == [seen["rates"][at] for at in skipped]


def test_noise_is_taken_off_the_embeddings_again(look: Look) -> None:
    assert look(DDP, "noisy_embeddings")[0]["left"] == []
