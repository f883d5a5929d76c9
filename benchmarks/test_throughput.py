"""Samples per second of each strategy on T5, two ranks, over raw DDP and over the loop by hand on the same library."""

from __future__ import annotations

import dataclasses

import pytest
from _loops import BEST, PEERS, Arm, ddp, session
from _measure import STRATEGIES, Quartiles, needs_peers, ratios, replayed, report, tell
from _ranks import measure_blocks

pytestmark = replayed

RANKS = 2

# By workload: samples per rank and step, blocks, and steps in a block.
SIZES = {"t5-tiny": (4, 30, 5), "t5-small": (4, 7, 1)}


@pytest.mark.parametrize("workload", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_throughput_of_session(benchmark, processor, strategy, workload):
    """How fast a session trains, over raw DDP at its defaults and over the raw backend at its best settings."""
    if strategy not in BEST:
        pytest.fail(f"no loop by hand is written for strategy {strategy!r}: add it to _loops.BEST")
    _compare(
        benchmark,
        workload,
        Arm("raw", BEST[strategy]),
        Arm("shardkit", session(strategy)),
        processor=processor,
        strategy=strategy,
    )


@needs_peers
@pytest.mark.parametrize("workload", SIZES)
@pytest.mark.parametrize("peer", PEERS)
def test_throughput_of_peer(benchmark, processor, peer, workload):
    """How fast the peers train on DDP, over the same two and beside a session."""
    ours = Arm("shardkit", session("ddp"))
    arm = Arm(peer, PEERS[peer])
    seconds = _compare(
        benchmark, workload, Arm("raw", BEST["ddp"]), arm, ours, processor=processor, strategy=f"ddp under {peer}"
    )
    over_peer = ratios(seconds[peer], seconds["shardkit"])
    benchmark.extra_info["speed_of_shardkit_over_peer"] = dataclasses.asdict(over_peer)
    tell(
        f"speed of ddp over that under a peer: {workload}, {RANKS} ranks",
        peer=peer,
        shardkit_over_peer=over_peer.text(),
    )


def _compare(
    benchmark, workload: str, raw: Arm, arm: Arm, *others: Arm, processor: bool, strategy: str
) -> dict[str, list[float]]:
    batch, blocks, length = SIZES[workload]
    arms = [Arm("raw DDP", ddp()), Arm("raw DDP again", ddp()), raw, arm, *others]
    seconds = measure_blocks(arms, workload, batch, blocks=blocks, length=length, processor=processor)
    # Samples per second are one over seconds per step: the ratio of speeds is that of seconds, turned over.
    over_ddp = ratios(seconds["raw DDP"], seconds[arm.name])
    over_raw = ratios(seconds["raw"], seconds[arm.name])
    noise = ratios(seconds["raw DDP"], seconds["raw DDP again"])
    speed = Quartiles.of([RANKS * batch / value for value in seconds[arm.name]])
    report(
        benchmark,
        seconds[arm.name],
        samples_per_second=speed,
        speed_over_raw_ddp=over_ddp,
        speed_over_raw=over_raw,
        speed_of_raw_ddp_over_itself=noise,
    )
    tell(
        f"samples per second{' of the processor' if processor else ''}: {workload}, {RANKS} ranks, batch {batch} each",
        strategy=strategy,
        samples_per_second=speed.text(".1f"),
        over_raw=over_raw.text(),
        over_raw_DDP=over_ddp.text(),
        raw_over_raw_DDP=ratios(seconds["raw DDP"], seconds["raw"]).text(),
        noise=noise.text(),
    )
    return seconds
