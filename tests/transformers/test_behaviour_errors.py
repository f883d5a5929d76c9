"""What goes wrong under a flag: it is said on every rank, and nothing hangs."""

from __future__ import annotations

import pytest

from tests.transformers.conftest import Look, unlike

STRATEGIES = [
    "--strategy ddp",
    "--strategy fsdp",
    pytest.param("--strategy deepspeed:stage=2", marks=pytest.mark.slow),
    pytest.param("--strategy deepspeed:stage=3", marks=pytest.mark.slow),
]
every = pytest.mark.parametrize("flag", STRATEGIES)


@every
def test_loaders_of_other_lengths_are_refused_on_every_rank(look: Look, flag: str) -> None:
    first, second = look(flag, "loaders_of_other_lengths")
    assert first == second
    assert first["training"]["error"] == (
        "MismatchError: the loader of the training isn't equally long on every rank, and one would wait for the "
        "others:\n  rank 0: 3 steps, 6 micro-batches an epoch\n  rank 1: 2 steps, 4 micro-batches an epoch\n"
        "  give all ranks the same arguments, and loaders of the same length, for example by a DistributedSampler"
    )
    assert "rank 1: 5 steps, 4 micro-batches an epoch" in first["of so many steps"]["error"]
    for when in ("before training", "evaluation"):
        assert "rank 0: 3 batches\n  rank 1: 2 batches" in first[when]["error"]


@every
def test_a_loss_that_isnt_finite_is_an_error_on_every_rank_or_skipped(look: Look, flag: str) -> None:
    first, second = look(flag, "losses_not_finite")
    assert first["raised"] == second["raised"]
    assert first["raised"]["error"].startswith("NonFiniteError: step 2")
    assert "rank 0: nan" in first["raised"]["error"]
    assert first["until"]["steps"] == 1
    for seen in (first, second):
        assert (seen["moved"], seen["left out"], seen["skipped"]["steps"]) == (2, 1, 3)
        # The schedule didn't count it.
        assert seen["skipped"]["rates"][1] == seen["skipped"]["rates"][2]
        assert len(seen["skipped"]["warned"]) == 1


@every
def test_an_output_without_a_loss_is_refused(look: Look, flag: str) -> None:
    for seen in look(flag, "outputs_without_a_loss"):
        assert seen["dict"]["error"].startswith("ValueError: The model did not return a loss")
        assert seen["tuple"]["error"] == (
            "InputError: the loss is a scalar, not of shape (2, 1): reduce it with .mean()"
        )


@every
def test_training_goes_on_after_an_error_in_mid_window_or_says_that_it_cant(look: Look, flag: str) -> None:
    for seen in look(flag, "training_that_breaks"):
        for where in ("forward", "backward"):
            assert seen[where]["first"] == {"error": "RuntimeError: broken"}
        assert unlike(seen["whole"], seen["forward"]["again"]) == []
        assert seen["backward"]["again"]["error"].startswith("StateError: backward failed with RuntimeError")
        assert seen["late"] == {"error": "RuntimeError: broken"}
        assert unlike(seen["whole"], seen["resumed"]) == []


@every
def test_a_session_that_ended_takes_the_optimizers_state_with_it(look: Look, flag: str) -> None:
    for seen in look(flag, "sessions_that_ended"):
        for how in ("taken", "closed"):
            assert "this Trainer's session was closed" in seen[how]["error"]
        assert seen["whole"] == [16, 4, 4, 1]


@every
def test_calls_of_the_accelerator_that_cant_be_answered_are_refused(look: Look, flag: str) -> None:
    for seen in look(flag, "odd_calls"):
        assert {name: found["error"].split(":")[0] for name, found in seen.items()} == {
            "value": "UnsupportedError",
            "norm": "UnsupportedError",
            "alone": "UnsupportedError",
            "unused": "UnsupportedError",
            "closure": "InputError",
            "options": "UnsupportedError",
        }
