"""What callbacks and the log see, under the flags as in the library."""

from __future__ import annotations

import pytest

from tests.transformers import tiny
from tests.transformers.conftest import SHARDING, Look, pairs, unlike

CALLBACKS = ("events", "stops", "changed_groups")
DDP = "--strategy ddp"
WINDOW = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log"]


@pairs(CALLBACKS)
def test_callbacks_see_what_they_see_in_the_librarys_own_trainer(look: Look, name: str, flag: str) -> None:
    for expected, seen in zip(look("own", name), look(flag, name), strict=True):
        assert "error" not in expected
        assert unlike(expected, seen) == []


def test_events_come_in_order(look: Look) -> None:
    epoch = ["epoch_begin", *WINDOW * 3, "epoch_end", "prediction_step", "prediction_step", "log", "evaluate"]
    ends = ["log", "train_end", "prediction_step", "predict"]
    assert look(DDP, "events")[0]["events"] == ["init_end", "train_begin", *epoch * 2, *ends]


def test_weights_move_between_the_two_events_of_the_optimizer(look: Look) -> None:
    assert look(DDP, "events")[0]["seen"][1::3] == [True] * 6


def test_a_callback_stops_the_training_or_the_epoch(look: Look) -> None:
    seen = look(DDP, "stops")[0]
    assert seen["should_training_stop"]["steps"] == 1
    assert seen["should_epoch_stop"]["steps"] == 1 + 3
    assert seen["early"]["steps"] == 2


def test_a_training_that_stopped_in_mid_window_leaves_nothing_for_the_next(look: Look) -> None:
    seen = look(DDP, "stops")[0]
    assert seen["mid-window should_training_stop"]["steps"] == 1
    # 2 epochs of 3 steps, from where the first training stood.
    assert seen["again after should_training_stop"]["steps"] == 6


def test_what_a_callback_writes_into_a_group_holds(look: Look) -> None:
    assert look(DDP, "changed_groups")[0]["rates"][:2] == [0.01, 0.01]


@pytest.mark.parametrize("flag", ["own", DDP, *SHARDING])
def test_operations_tokens_and_parameters_are_counted(look: Look, flag: str) -> None:
    model = tiny.t5()
    # 22 samples of 8 tokens, 2 of them twice so that the ranks have the same number.
    tokens = 24 * 8
    for seen in look(flag, "counts"):
        assert seen["tokens"] == tokens
        assert seen["flos"] == seen["metric"] == 6 * tokens * model.num_parameters(exclude_embeddings=True)
        assert seen["trainable"] == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("flag", [DDP, *SHARDING, pytest.param("--strategy deepspeed:stage=2", marks=pytest.mark.slow)])
def test_the_log_has_the_same_entries(look: Look, flag: str) -> None:
    for expected, seen in zip(look("own", "counts"), look(flag, "counts"), strict=True):
        for name in ("metrics", "rates", "log", "zero", "local", "main"):
            assert seen[name] == expected[name]
