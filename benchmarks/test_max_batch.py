"""The largest batch that trains within one budget of memory: each strategy, raw DDP, the raw library, the peers."""

from __future__ import annotations

from functools import cache

import pytest
from _loops import BEST, DEFAULT, PEERS, Arm, session
from _measure import STRATEGIES, needs_peers, ratios, replayed, report, tell
from _ranks import largest_batch, measure_blocks
from _workloads import WORKLOADS

import shardkit
from shardkit.planner._results import Row

pytestmark = replayed

WORKLOAD = "t5-short"
BUDGET = 320 * 2**20
"""Bytes of a rank: nearly six times the weights, of which plain data parallel holds five."""

_known: dict[str, tuple[int, int]] = {}


@cache
def _planned(strategy: str) -> Row:
    """Return what the planner says of a strategy: where a search starts, which saves trials and decides nothing."""
    make = WORKLOADS[WORKLOAD]
    return shardkit.plan(make, memory=BUDGET, strategies=[strategy], precisions=["fp32"], device="cpu").rows[0]


RAW = "ddp:gradient_as_bucket_view=false"
"""What is planned like DistributedDataParallel at its defaults.

A search has to start near the answer: between batches whose small tensors lie in the heap and those whose tensors are
mapped, one that is larger may take less, and 12 samples fit raw DDP, 13 don't, and 26 do.
"""


def _raw_ddp() -> int:
    return _largest(Arm("raw at its defaults", DEFAULT["ddp"]), RAW)


def _largest(arm: Arm, strategy: str, *, beside: str | None = None) -> int:
    """Return an arm's largest batch; one that several tests compare with is searched for once.

    The search starts with the batch of the arm ``beside`` it, or with the plan of the strategy.
    """
    key = f"{strategy}, {arm.name}"
    if key not in _known:
        row = _planned(strategy)
        first = _known[f"{strategy}, {beside}"][0] if beside is not None else row.largest
        estimate = row.estimate if row.points else None
        _known[key] = largest_batch(arm, WORKLOAD, BUDGET, estimate=estimate, first=first or None)
        print(f"{key}: {_known[key]}", flush=True)
    return _known[key][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_largest_batch_of_session(benchmark, strategy):
    """A session trains a batch as large as the raw library at its defaults does; told is that at the best known too."""
    if strategy not in BEST:
        pytest.fail(f"no loop by hand is written for strategy {strategy!r}: add it to _loops.BEST")
    found = _largest(Arm("shardkit", session(strategy)), strategy)
    best = _largest(Arm("raw", BEST[strategy]), strategy, beside="shardkit")
    defaults = _largest(Arm("raw at its defaults", DEFAULT[strategy]), strategy, beside="raw")
    plain = _raw_ddp()
    trials = _known[f"{strategy}, shardkit"][1]
    figures = {"raw_ddp": plain, "raw_at_its_defaults": defaults, "raw": best, "shardkit": found, "trials": trials}
    report(benchmark, [float(found)], **figures)
    tell(
        f"largest batch of a rank within {BUDGET // 2**20} MiB: {WORKLOAD}, 2 ranks",
        strategy=strategy,
        raw_DDP=str(plain),
        raw_at_its_defaults=str(defaults),
        raw_at_its_best=str(best),
        shardkit=str(found),
        trials=str(trials),
    )
    assert found >= defaults, f"{strategy} fits {found}, the raw library at its defaults {defaults}"


@needs_peers
@pytest.mark.parametrize("peer", PEERS)
def test_largest_batch_of_peer(benchmark, peer):
    """The largest batch under a peer's wrapper of DistributedDataParallel, beside a session's and raw DDP's."""
    ours = _largest(Arm("shardkit", session("ddp")), "ddp")
    plain = _raw_ddp()
    found = _largest(Arm(peer, PEERS[peer]), RAW, beside="raw at its defaults")
    report(benchmark, [float(found)], raw_ddp=plain, peer=found, shardkit=ours)
    tell(
        f"largest batch of a rank within {BUDGET // 2**20} MiB: peers on DDP, {WORKLOAD}, 2 ranks",
        peer=peer,
        raw_DDP=str(plain),
        largest_batch=str(found),
        shardkit=str(ours),
    )
    assert ours >= found


@needs_peers
def test_speed_of_ddp_within_the_budget(benchmark, request):
    """Samples per second of the processor, each arm with the largest batch that fits it: what the budget buys."""
    _raw_ddp()
    ours = _largest(Arm("shardkit", session("ddp")), "ddp")
    arms = [Arm("raw at its defaults", DEFAULT["ddp"]), Arm("raw again", DEFAULT["ddp"])]
    arms += [Arm(peer, PEERS[peer]) for peer in PEERS]
    batches = {"shardkit": ours, "raw at its defaults": _raw_ddp(), "raw again": _raw_ddp()}
    batches |= {peer: _largest(Arm(peer, PEERS[peer]), RAW, beside="raw at its defaults") for peer in PEERS}
    arms.append(Arm("shardkit", session("ddp")))
    blocks = request.config.getoption("--blocks") or 9
    seconds = measure_blocks(arms, WORKLOAD, batches, blocks=blocks, length=3, processor=True)
    each = {name: [value / batches[name] for value in seconds[name]] for name in seconds}
    for arm in arms:
        tell(
            f"speed with the largest batch within {BUDGET // 2**20} MiB, by the processor: {WORKLOAD}, 2 ranks",
            arm=arm.name,
            batch=str(batches[arm.name]),
            over_raw_DDP=ratios(each["raw at its defaults"], each[arm.name]).text(),
        )
    over = {name: ratios(each["raw at its defaults"], each[name]) for name in each}
    report(benchmark, seconds["shardkit"], **{f"{name}, over raw": found for name, found in over.items()})
    assert over["shardkit"].median >= over["raw again"].low, "the budget buys less speed than raw DDP's"
