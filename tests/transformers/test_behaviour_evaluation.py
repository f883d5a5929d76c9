"""How a Trainer evaluates and predicts, under the flags as in the library."""

from __future__ import annotations

from tests.transformers.conftest import Look, pairs, unlike

EVALUATION = ("evaluated_before_training", "evaluated_in_the_midst", "how_it_evaluates", "generated")
DDP = "--strategy ddp"


@pairs(EVALUATION)
def test_evaluation_is_that_of_the_librarys_own_trainer(look: Look, name: str, flag: str) -> None:
    for expected, seen in zip(look("own", name), look(flag, name), strict=True):
        assert "error" not in expected
        assert unlike(expected, seen) == []


def test_each_sample_is_evaluated_once(look: Look) -> None:
    seen = look(DDP, "how_it_evaluates")[0]
    # 7 samples are 2 batches of 2 on each of 2 ranks, of which one is there twice.
    assert [seen[name]["eval_rows"] for name in ("plain", "accumulated", "preprocessed")] == [7, 7, 7]
    assert seen["by batch"]["eval_calls"] == 2.0
    assert "eval_right" not in seen["loss only"]
    assert seen["by batch"]["eval_right"] == seen["plain"]["eval_right"]


def test_evaluations_in_the_midst_go_over_all_sets(look: Look) -> None:
    seen = look(DDP, "evaluated_in_the_midst")[0]
    # Before the training and behind each of 3 steps.
    assert [next(iter(entry)) for entry in seen["evaluations"]] == ["eval_a_loss", "eval_b_loss"] * 4


def test_ranks_may_generate_different_lengths(look: Look) -> None:
    for flag in ("own", DDP):
        seen = look(flag, "generated")[0]
        assert seen["uneven"]["words"] != seen["greedy"]["words"]
        # 5 samples for 2 ranks in batches of 2: what fills the last batch is gathered with the others.
        assert seen["greedy"]["rows"] == 8
