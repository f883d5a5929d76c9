"""What is planned against what is measured: the peak of a rank, and the largest batch within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

import shardkit
from shardkit.bench import Trials, find_max_batch, measure
from shardkit.planner._results import Plan, Row

PEAK = 0.10
"""How far a planned peak may lie from the measured one, relative to it: what a plan promises."""

BATCH = 0.10
"""The same of the largest batch; below ten it is one sample."""

PAGE = 4096

BUDGETS = {
    "t5-tiny": "256MiB",
    "gpt2-tiny": "256MiB",
    "mlp": "256MiB",
    "convnet": "256MiB",
    "t5-small": "1536MiB",
    "gpt2:length=64": "2560MiB",
}
"""Of each workload a memory in which its model is small beside its activations, or, of the last two, most of it."""

STRATEGIES = [variant.strategy for backend in shardkit.backends().values() for variant in backend.variants_on("cpu")]
QUICK = {("t5-tiny", "fairscale"), ("mlp", "deepspeed:stage=3")}
"""What the default tests try; the others are slow."""

CELLS = [
    pytest.param(workload, under, marks=[] if (workload, under) in QUICK else pytest.mark.slow)
    for workload in BUDGETS
    for under in STRATEGIES
]


@cache
def planned(workload: str) -> Plan:
    return shardkit.plan(workload, memory=BUDGETS[workload], precisions=["fp32"], device="cpu")


def row(workload: str, under: str) -> Row:
    return next(row for row in planned(workload).rows if row.strategy == under)


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Iterator[dict[str, Trials]]:
    open_trials: dict[str, Trials] = {}
    yield open_trials
    for found in open_trials.values():
        found.__exit__(None, None, None)


def trials_of(workload: str, trials: dict[str, Trials]) -> Trials:
    if workload not in trials:
        trials[workload] = Trials(workload, processes=2, device="cpu", steps=4).__enter__()
    return trials[workload]


@pytest.mark.parametrize(("workload", "under"), CELLS)
def test_the_planned_peak_is_the_measured_one(workload: str, under: str, trials: dict[str, Trials]) -> None:
    found = row(workload, under)
    assert found.status == "fits"
    assert found.largest
    trial = measure(trials_of(workload, trials), under, found.largest)
    assert trial.fits
    measured = max(trial.peak)
    print(f"{workload} {under} batch {found.largest}: planned {found.peak / 2**20:.1f} MiB, ", end="")
    print(f"measured {measured / 2**20:.1f} MiB, ratio {found.peak / measured:.3f}")
    assert found.peak == pytest.approx(measured, rel=PEAK)


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "under"), [(workload, name) for workload in BUDGETS for name in STRATEGIES])
def test_the_planned_largest_batch_is_the_measured_one(workload: str, under: str, trials: dict[str, Trials]) -> None:
    found = row(workload, under)
    assert found.largest
    measured = find_max_batch(trials_of(workload, trials), under, memory=BUDGETS[workload], estimate=found.estimate)
    print(f"{workload} {under}: planned {found.largest}, measured {measured.batch}, {len(measured.trials)} trials")
    assert abs(found.largest - measured.batch) <= max(1, BATCH * measured.batch)
    # A limit goes by pages: of samples that take less than one, several lie within its noise.
    assert len(measured.trials) <= (6 if max(measured.peak_memory) / measured.batch >= PAGE else 10)
