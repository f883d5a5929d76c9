"""Some of the cases on one and on three ranks: what they compare with is one process, whatever the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.testing import run
from tests.cases.test_cases import CASES, _run_cases

CHOSEN = (
    "a_parameter_that_is_never_used_is_left_alone",
    "a_parameter_that_a_step_leaves_out_is_left_alone_in_it",
    "a_parameter_frozen_in_mid_run_stays_until_it_is_thawed",
    "a_tied_parameter_gets_the_sum_of_its_gradients",
    "groups_that_are_empty_or_frozen_train_nothing",
    "parameters_of_any_shape_train_side_by_side",
    "settings_changed_in_mid_run_hold_from_the_next_step_in_every_group",
    "state_that_an_optimizer_brings_counts_under_every_class",
    "weights_loaded_after_prepare_hold_from_then_on",
    "weights_loaded_into_a_part_hold_from_then_on",
)


@pytest.mark.parametrize("processes", [1, 3])
def test_cases_hold_on_any_number_of_ranks(processes: int, strategy: str, tmp_path: Path) -> None:
    assert set(CHOSEN) <= set(CASES)
    for rank, outcomes in enumerate(run(_run_cases, strategy, list(CHOSEN), tmp_path, processes=processes)):
        failures = [f"{name} on rank {rank}:\n{told['traceback']}" for name, told in outcomes.items() if told]
        assert not failures, "\n".join(failures)
