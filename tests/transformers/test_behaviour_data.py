"""What data and models a Trainer takes, under the flags as in the library."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.transformers import behaviours
from tests.transformers.conftest import Look, pairs, unlike

DATA = ("grouped_by_length", "streams", "few_samples", "columns", "outputs", "several_labels")
DDP = "--strategy ddp"


@pairs(DATA)
def test_data_is_used_as_by_the_librarys_own_trainer(look: Look, name: str, flag: str) -> None:
    for expected, seen in zip(look("own", name), look(flag, name), strict=True):
        assert "error" not in expected
        assert unlike(expected, seen) == []


def test_streams_train_as_long_as_asked(look: Look) -> None:
    seen = look(DDP, "streams")[0]
    # A pass over 22 samples has 6 micro-batches on each rank, and the next one begins where it ends.
    assert [seen[name]["steps"] for name in ("endless", "sized", "uneven")] == [5, 3, 2]


def test_fewer_samples_than_a_batch_are_enough(look: Look) -> None:
    seen = look(DDP, "few_samples")[0]
    assert [seen[name]["steps"] for name in ("dropped", "fewer", "one")] == [1, 1, 2]


def test_columns_that_the_model_doesnt_take_are_left_out_unless_asked_for(look: Look) -> None:
    assert look(DDP, "columns")[0]["kept"] == "TypeError: Line.forward() got an unexpected keyword argument 'unknown'"


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs workers that are forked")
def test_workers_load_the_data(tmp_path: Path) -> None:
    # In this process, since ranks of tests may have no children.
    seen = []
    for flags, workers in (({"strategy": "ddp"}, 1), ({"strategy": "ddp"}, 0), (None, 1)):
        trainer = behaviours.Side(str(tmp_path), flags).trainer(dataloader_num_workers=workers)
        trainer.train()
        seen.append(behaviours.steps(trainer))
        trainer.end()
    assert seen[0] == seen[1]
    assert unlike(seen[2], seen[0]) == []
