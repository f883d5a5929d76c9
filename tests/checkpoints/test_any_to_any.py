"""A run goes on from its checkpoint under any strategy on any number of ranks, as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.testing import _ahead, run
from tests.checkpoints._runs import (
    OPTIMIZERS,
    Job,
    Trace,
    alone,
    begin,
    contents,
    copy_of,
    from_the_start_again,
    place,
    resume,
    resume_each,
    settings,
)
from tests.parity import compare
from tests.parity.tolerances import LOSS, WEIGHT

SIZES = (1, 2, 3, 4)


def takes(strategy: str, optimizer: str) -> bool:
    """Return whether a strategy trains with an optimizer: those that cut parameters refuse Adafactor."""
    return optimizer != "Adafactor" or not any(f"stage={stage}" in strategy for stage in (1, 2, 3))


def strategies(optimizer: str) -> list[str]:
    """Return all declared strategies that train with an optimizer."""
    declared = [variant.strategy for backend in shardkit.backends().values() for variant in backend.variants_on("cpu")]
    return [strategy for strategy in declared if takes(strategy, optimizer)]


# To the last bit.


def slowly(optimizers: list[str], sizes: list[int]) -> list[object]:
    """Return all optimizers at all world sizes, for the slow tests but for those given."""
    return [
        pytest.param(optimizer, size, marks=[] if optimizer in optimizers and size in sizes else pytest.mark.slow)
        for optimizer in OPTIMIZERS
        for size in SIZES
    ]


@pytest.mark.parametrize(("optimizer", "size"), slowly(["AdamW"], [3]))
def test_in_fresh_processes_the_next_losses_and_weights_have_the_same_bits(
    optimizer: str, size: int, strategy: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not takes(strategy, optimizer):
        return
    selected = _ahead.selected(request.session, request.function, "strategy", "optimizer", "size")
    jobs = tuple((a, b) for a, b, other in selected if b == optimizer and other == size and takes(a, b))
    folder = tmp_path_factory.getbasetemp() / "exactly"
    wanted, found = (ranks[strategy, optimizer] for ranks in interrupted(jobs, size, folder))
    for rank in range(size):
        assert found[rank].losses == wanted[rank].losses
    assert not compare.differing_bits(found[0].weights, wanted[0].weights)


def test_from_a_checkpoint_of_the_start_the_same_run_comes_again(tmp_path: Path) -> None:
    jobs = [(strategy, "AdamW") for strategy in strategies("AdamW")]
    for differing in run(from_the_start_again, jobs, tmp_path, processes=3, timeout=300):
        assert differing == {job: [] for job in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_where_a_layer_was_frozen_meanwhile_too_they_have_the_same_bits(
    size: int, strategy: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    selected = _ahead.selected(request.session, request.function, "strategy", "size")
    jobs = tuple((one, "SGD") for one, other in selected if other == size)
    folder = tmp_path_factory.getbasetemp() / "freezing"
    wanted, found = (ranks[strategy, "SGD"] for ranks in interrupted(jobs, size, folder, True))
    for rank in range(size):
        assert found[rank].losses == wanted[rank].losses
    assert not compare.differing_bits(found[0].weights, wanted[0].weights)


HALVES = [
    "ddp:precision=fp16,loss_scale=1e6,loss_scale_window=2",
    "fairscale:precision=fp16,loss_scale=1e6,loss_scale_window=2,accumulate=2",
    "fairscale:shard=optimizer,precision=bf16,accumulate=2,max_grad_norm=0.5",
    "deepspeed:stage=0,accumulate=2,max_grad_norm=0.5",
    "deepspeed:stage=1,precision=bf16,half_weights=true,accumulate=2",
    "deepspeed:stage=2,precision=bf16,half_weights=true,accumulate=2",
    "deepspeed:stage=2,precision=fp16,loss_scale=1e6,loss_scale_window=2,offload_optimizer=cpu",
    "deepspeed:stage=3,precision=bf16,half_weights=true,accumulate=2",
    "deepspeed:stage=3,precision=fp16,loss_scale=1e6,loss_scale_window=2,accumulate=2",
]


@pytest.mark.parametrize("half", HALVES)
def test_in_other_precisions_and_windows_too_they_have_the_same_bits(
    half: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs = tuple((one, "AdamW") for (one,) in _ahead.selected(request.session, request.function, "half"))
    wanted, found = (
        ranks[half, "AdamW"] for ranks in interrupted(jobs, 3, tmp_path_factory.getbasetemp() / "in halves")
    )
    for rank in range(3):
        assert found[rank].losses == wanted[rank].losses
        assert found[rank].scale == wanted[rank].scale
    assert not compare.differing_bits(found[0].weights, wanted[0].weights)
    if "fp16" in half:
        # Neither where it began nor where a fresh one would be by now.
        assert wanted[0].scale is not None
        assert wanted[0].scale[0] < 1e6


Traces = dict[Job, list[Trace]]


@cache
def interrupted(jobs: tuple[Job, ...], size: int, folder: Path, freezing: bool = False) -> tuple[Traces, Traces]:
    """Return each rank's trace, by job, of runs that were never interrupted, and of those that went on from a save."""
    through = run(begin, jobs, folder, True, True, freezing, processes=size, timeout=600)
    # In another order, so that nothing that a process learns from one session helps the next.
    back = [(job, [place(folder, job, size)]) for job in reversed(jobs)]
    ranks = run(resume_each, back, None, True, freezing, processes=size, timeout=600)
    again = [[one for (one,) in rank][::-1] for rank in ranks]
    return by_job(jobs, through), by_job(jobs, again)


def by_job(jobs: tuple[Job, ...], ranks: list[list[Trace]]) -> Traces:
    return {job: [rank[number] for rank in ranks] for number, job in enumerate(jobs)}


# Across.


@cache
def saved(optimizer: str, size: int, folder: Path, wanted: tuple[str, ...] = ()) -> dict[str, Path]:
    """Return the checkpoints of runs at a world size, by strategy."""
    jobs = [(strategy, optimizer) for strategy in wanted or strategies(optimizer)]
    run(begin, jobs, folder, processes=size, timeout=600)
    return {job[0]: place(folder, job, size) for job in jobs}


def goes_on(ranks: list[Trace], optimizer: str, source: Path, copy: Path) -> None:
    """Fail unless a run went on like the one that was never interrupted, from exactly what it was given."""
    goes_on_like(ranks, alone(optimizer))
    given, taken = contents(source), contents(copy)
    assert not compare.differing_bits(given, taken)
    assert {name: (value.dtype, value.shape) for name, value in given.items()} == {
        name: (value.dtype, value.shape) for name, value in taken.items()
    }
    assert settings(source) == settings(copy)


def goes_on_like(ranks: list[Trace], expected: Trace) -> None:
    losses = torch.tensor([trace.losses for trace in ranks], dtype=torch.float64).mean(0).tolist()
    for number, (loss, other) in enumerate(zip(losses, expected.losses, strict=True)):
        assert loss == pytest.approx(other, rel=LOSS), f"step {number} behind the checkpoint"
    compare.within(WEIGHT, compare.tensors("at the end,", ranks[0].weights, expected.weights))


def test_ddp_on_3_ranks_goes_on_from_every_strategy_on_2(tmp_path: Path) -> None:
    sources = list(saved("AdamW", 2, tmp_path / "from").values())
    job = ("ddp", "AdamW")
    ranks = run(resume, job, sources, tmp_path / "to", processes=3)
    assert len(sources) == len(strategies("AdamW"))
    for number, source in enumerate(sources):
        goes_on([rank[number] for rank in ranks], "AdamW", source, copy_of(tmp_path / "to", job, number))


def test_every_strategy_on_2_ranks_goes_on_from_ddp_on_3(tmp_path: Path) -> None:
    source = saved("SGD", 3, tmp_path / "from", ("ddp",))["ddp"]
    jobs = [(strategy, "SGD") for strategy in strategies("SGD")]
    ranks = run(resume_each, [(job, [source]) for job in jobs], tmp_path / "to", processes=2)
    for number, job in enumerate(jobs):
        goes_on([rank[number][0] for rank in ranks], "SGD", source, copy_of(tmp_path / "to", job, 0))


CHAIN = [
    (1, "deepspeed:stage=3", "ddp"),
    (4, "fairscale", "fairscale:shard=optimizer"),
    (3, "deepspeed:stage=2,offload_optimizer=cpu", "deepspeed:stage=0"),
    (2, "ddp", "fairscale"),
    (1, "deepspeed:stage=1", "ddp"),
]


def test_a_run_goes_on_through_strategies_and_world_sizes(tmp_path: Path) -> None:
    sources: list[list[Path]] = [[], []]
    for number, (size, *pair) in enumerate(CHAIN):
        jobs = list(zip(pair, ("AdamW", "Adafactor"), strict=True))
        if number == 0:
            run(begin, jobs, tmp_path, processes=size)
            sources = [[place(tmp_path, job, size)] for job in jobs]
            continue
        copies = tmp_path / str(number)
        ranks = run(resume_each, list(zip(jobs, sources, strict=True)), copies, processes=size)
        for at, job in enumerate(jobs):
            copy = copy_of(copies, job, 0)
            goes_on([rank[at][0] for rank in ranks], job[1], sources[at][0], copy)
            sources[at] = [copy]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_strategy_goes_on_from_every_strategy_at_every_world_size(
    optimizer: str, size: int, strategy: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not takes(strategy, optimizer):
        return
    folder = tmp_path_factory.getbasetemp() / "every"
    sources = [path for other in SIZES for path in saved(optimizer, other, folder).values()]
    job = (strategy, optimizer)
    ranks = run(resume, job, sources, tmp_path, processes=size, timeout=600)
    for number, source in enumerate(sources):
        goes_on([rank[number] for rank in ranks], optimizer, source, copy_of(tmp_path, job, number))
