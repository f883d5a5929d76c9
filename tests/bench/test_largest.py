"""The largest batch within a budget, found by training: small models, small budgets, two ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import shardkit
from shardkit import Workload
from shardkit.bench import MaxBatch, Trial, Trials, find_max_batch, measure
from shardkit.errors import InputError, OutOfMemoryError, StrategyError, TrialError
from shardkit.testing import run
from shardkit.tools.report import to_json
from tests.bench import _brute, planted

MIB = 2**20


class Sharing:
    """Trials of one workload after another by the processes of the first, which have imported what all need."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials

    def __call__(self, workload: Callable[[], Workload], timeout: float = 60) -> Trials:
        self.trials.workload, self.trials.timeout = workload, timeout
        return self.trials


@pytest.fixture(scope="module")
def trials() -> Iterator[Sharing]:
    with Trials(planted.sized, processes=2, device="cpu", steps=4) as found:
        yield Sharing(found)


@pytest.fixture(scope="module")
def found(trials: Sharing) -> MaxBatch:
    return find_max_batch(trials(planted.sized), "ddp", memory="48MiB")


def test_the_answer_ran_and_one_more_failed(found: MaxBatch) -> None:
    tried = {trial.batch: trial.outcome for trial in found.trials}
    assert tried[found.batch] == "fits"
    assert tried[found.batch + 1] == "out of memory"
    assert len(found.trials) <= 6
    assert (found.accumulate, found.global_batch) == (1, 2 * found.batch)


def test_torch_alone_within_the_same_limit_trains_the_same_batch_and_no_more(found: MaxBatch) -> None:
    assert run(_brute.fits, found.batch, found.memory) == [True, True]
    assert run(_brute.fits, found.batch + 1, found.memory) == [False, False]


def test_the_peak_of_a_trial_is_what_its_activations_take(found: MaxBatch, trials: Sharing) -> None:
    small = measure(trials(planted.sized), "ddp", 2)
    grown = max(found.best.peak) - max(small.peak)
    samples = found.batch - 2
    assert grown == pytest.approx(5 * samples * planted.SAMPLE, rel=0.05)
    assert max(found.peak_memory) <= max(found.best.reserved) + 2 * MIB
    assert found.memory - 5.5 * planted.SAMPLE < max(found.best.reserved) <= found.memory
    assert all(base > 100 * MIB for base in found.base_memory)
    assert len(found.best.step_seconds) == 4
    assert all(len(held) == 4 for held in found.best.held)


def test_the_answer_says_what_it_holds_for(found: MaxBatch) -> None:
    assert (found.workload, found.strategy, found.memory, found.processes) == ("sized", "ddp", 48 * MIB, 2)
    assert found.leak is None
    assert "M_MMAP_THRESHOLD" in found.notes[0]
    told = json.loads(to_json(found.to_dict()))
    assert told["batch"] == found.batch
    assert [trial["batch"] for trial in told["trials"]] == [trial.batch for trial in found.trials]
    assert told["peak_memory"] == list(found.peak_memory)


def test_a_right_estimate_takes_few_trials(found: MaxBatch, trials: Sharing) -> None:
    best = found.best
    per_sample = 5 * planted.SAMPLE
    rest = max(best.reserved) - per_sample * best.batch
    again = find_max_batch(
        trials(planted.sized), "ddp", memory=found.memory, estimate=lambda size: rest + per_sample * size
    )
    assert again.batch == found.batch
    assert len(again.trials) <= 4


def test_accumulation_makes_up_for_a_global_batch(found: MaxBatch, trials: Sharing) -> None:
    """Of 12 samples for a rank 12 and 6 are tried before what fits beside the gradients of a window."""
    own = 2 * found.batch
    own += own % 2
    again = find_max_batch(trials(planted.sized), "ddp", memory=found.memory, global_batch=2 * own)
    divisors = [size for size in range(1, own + 1) if own % size == 0]
    larger = divisors[divisors.index(again.batch) + 1]
    tried = {trial.batch: trial.outcome for trial in again.trials}
    assert (tried[again.batch], tried[larger]) == ("fits", "out of memory")
    assert again.batch * again.accumulate * 2 == again.global_batch == 2 * own
    assert set(tried) <= set(divisors)
    assert f"accumulate={again.accumulate}" in again.strategy


def test_the_whole_global_batch_may_fit(trials: Sharing) -> None:
    again = find_max_batch(trials(planted.sized), "ddp", memory="64MiB", global_batch=8)
    assert (again.batch, again.accumulate, again.global_batch) == (4, 1, 8)
    assert "whole of the global batch" in again.notes[0]


def test_the_search_ends_at_the_largest_size_that_was_to_be_tried(trials: Sharing) -> None:
    again = find_max_batch(trials(planted.sized), "ddp", memory="64MiB", max_batch=2)
    assert again.batch == 2
    assert "largest batch that was to be tried" in again.notes[0]


def test_one_sample_that_does_not_fit_says_what_was_asked_for_and_what_would_fit(trials: Sharing) -> None:
    with pytest.raises(OutOfMemoryError, match=r"not even a batch of 1 fits into 3 MiB per rank under 'ddp'") as caught:
        find_max_batch(trials(planted.sized), "ddp", memory="3MiB", alternatives=lambda: "4MiB would do")
    assert "could not be allocated" in str(caught.value)
    assert "4MiB would do" in str(caught.value)
    assert caught.value.asked >= planted.SAMPLE


def test_memory_that_one_rank_lacks_is_lacking_to_all(found: MaxBatch, trials: Sharing) -> None:
    less = find_max_batch(trials(planted.hungry_rank), "ddp", memory=found.memory + 40 * MIB)
    assert abs(less.batch - found.batch) <= 1
    assert all(trial.rank == 1 for trial in less.trials if not trial.fits)


def test_memory_that_a_library_was_short_of_counts_behind_its_own_error(found: MaxBatch, trials: Sharing) -> None:
    trial = measure(trials(planted.wrapping), "ddp", 3 * found.batch, memory=found.memory)
    assert trial.outcome == "out of memory"
    assert trial.asked >= planted.SAMPLE


def test_a_wrong_shape_is_reported_with_its_traceback(trials: Sharing) -> None:
    with pytest.raises(TrialError, match=r"batch 4: rank \d: RuntimeError: mat1 and mat2 shapes") as caught:
        find_max_batch(trials(planted.misshapen), "ddp", memory="48MiB")
    assert "it fails with every batch: with 1 too" in str(caught.value)
    assert "planted.py" in str(caught.value.traceback)
    assert (caught.value.batch, caught.value.rank in (0, 1)) == (4, True)


def test_a_failure_of_large_batches_alone_is_said_to_be_one(trials: Sharing) -> None:
    with pytest.raises(TrialError, match=r"(?s)batch 4: rank \d: RuntimeError.*a matter of size: batch 1 trains"):
        find_max_batch(trials(planted.misshapen_from_three_on), "ddp", memory="48MiB")


def test_a_workload_that_ignores_the_size_is_refused(trials: Sharing) -> None:
    with pytest.raises(InputError, match=r"batches\(4\) of the workload yields 6 samples: it ignores the size"):
        find_max_batch(trials(planted.ignores_the_size), "ddp", memory="48MiB")


def test_a_loss_that_is_no_scalar_is_refused(trials: Sharing) -> None:
    with pytest.raises(InputError, match=r"loss of the workload returns a tensor of shape \(2,\)"):
        find_max_batch(trials(planted.vector_loss), "ddp", memory="48MiB")


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (planted.crashing, "rank 1 was ended by SIGSEGV"),
        (planted.killed, "rank 1 was ended by SIGKILL"),
        (planted.leaving, "rank 1 ended with exit code 3"),
        (planted.says_out_of_memory, "rank 1: RuntimeError: CUDA out of memory: so it says"),
        (planted.says_it_could_not_allocate, "rank 1: RuntimeError: .*you tried to allocate 64 bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_ends_for_another_reason_does_not_count_as_out_of_memory(
    workload: Callable[[], Workload], text: str, trials: Sharing
) -> None:
    with pytest.raises(TrialError, match=text) as caught:
        measure(trials(workload), "ddp", 2, memory="48MiB")
    assert (caught.value.rank, caught.value.batch) == (1, 2)


def test_a_hang_ends_when_no_step_does_and_shows_where(trials: Sharing) -> None:
    with pytest.raises(TrialError, match=r"batch \d+: rank .*ended no step within 3 s") as caught:
        find_max_batch(trials(planted.sleeping, timeout=3), "ddp", memory="48MiB")
    trials.trials.timeout = 60
    assert "sleep_long" in str(caught.value)


def test_a_leak_is_told_with_its_slope(trials: Sharing) -> None:
    found = find_max_batch(trials(planted.leaking), "ddp", memory="24MiB")
    assert found.leak == pytest.approx(MIB // 2, rel=0.1)
    assert "memory grows by" in found.notes[-1]
    assert "more steps than the 4 of a trial" in found.notes[-1]


def test_nothing_changes_in_the_process_that_asks(trials: Sharing) -> None:
    model = planted.sized()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}

    def state() -> tuple[object, ...]:
        return (
            random.getstate(),
            [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
            torch.get_rng_state().tolist(),
            dict(os.environ),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
            threading.active_count(),
            os.getcwd(),
            torch.get_num_threads(),
        )

    was = state()
    assert measure(trials(lambda: model), "ddp", 2, memory="48MiB").fits
    assert state() == was
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"memory": "much"}, InputError, "memory reads a number and a unit"),
        ({"memory": 0}, InputError, "above 0 bytes"),
        ({"processes": 0}, InputError, "processes is a whole number from 1 on"),
        ({"steps": 0}, InputError, "steps is a whole number from 1 on"),
        ({"timeout": 0}, InputError, "timeout is above 0"),
        ({"max_batch": 0}, InputError, "max_batch is a whole number from 1 on"),
        ({"global_batch": 7}, InputError, "a global batch of 7 can't be shared by 2"),
        ({"global_batch": 8, "accumulate": 2}, InputError, "give one of the two"),
        ({"device": "tpu"}, InputError, "a device is auto, cpu or cuda"),
        ({"workload": "mpl"}, InputError, "did you mean 'mlp'"),
        ({"workload": 3}, InputError, "a workload is a name"),
        ({"strategy": "ddp:"}, StrategyError, "a strategy reads"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_runs(settings: dict[str, object], error: type, text: str) -> None:
    given = {"workload": "mlp", "strategy": "ddp", "memory": "48MiB", **settings}
    with pytest.raises(error, match=text):
        shardkit.find_max_batch(given.pop("workload"), given.pop("strategy"), **given)  # type: ignore[arg-type]


def test_a_strategy_that_is_refused_is_refused_with_its_own_error(trials: Sharing) -> None:
    with pytest.raises(StrategyError, match="has no option 'buckets'"):
        find_max_batch(trials(planted.sized), "ddp:buckets=1", memory="48MiB")


def test_trials_of_which_a_budget_has_no_part_have_no_limit(trials: Sharing) -> None:
    trial: Trial = measure(trials(planted.sized), "ddp", 40)
    assert trial.fits
    assert max(trial.peak) > 100 * MIB
