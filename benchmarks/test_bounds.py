"""What our own bounds on memory cost in speed: buckets that are given up, gradients that wait for others to arrive."""

from __future__ import annotations

import sys

import pytest
from _loops import BEST, Arm, ddp, session, session_where
from _measure import Quartiles, ratios, replayed, report, tell
from _ranks import measure_blocks

pytestmark = replayed

WORKLOAD, BATCH = "t5-small", 4

# By what is bounded: the strategy, and the constant that bounds it, by the module that reads it.
BOUNDS = {
    "ddp, LARGE_BUCKET": ("ddp", "shardkit.averaging", "LARGE_BUCKET"),
    "fairscale, IN_FLIGHT": ("fairscale", "shardkit_fairscale._reduce", "IN_FLIGHT"),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_speed_with_bound(benchmark, blocks, processor, bound):
    """How fast a session trains with the bound as it is, over itself without one, and over the raw library."""
    strategy, module, name = BOUNDS[bound]
    arms = [
        Arm("raw DDP", ddp()),
        Arm("raw", BEST[strategy]),
        Arm("without", session_where(module, name, sys.maxsize, strategy)),
        Arm("with", session(strategy)),
        Arm("with, again", session(strategy)),
    ]
    seconds = measure_blocks(arms, WORKLOAD, BATCH, blocks=blocks, length=1, processor=processor)
    figures = {
        "speed_over_without": ratios(seconds["without"], seconds["with"]),
        "speed_over_raw": ratios(seconds["raw"], seconds["with"]),
        "speed_over_raw_ddp": ratios(seconds["raw DDP"], seconds["with"]),
        "speed_over_itself": ratios(seconds["with"], seconds["with, again"]),
    }
    report(benchmark, seconds["with"], **figures)
    tell(
        f"speed with a bound on memory: {WORKLOAD}, 2 ranks, batch {BATCH} each, {blocks} blocks of a step",
        bound=bound,
        seconds_per_step=Quartiles.of(seconds["with"]).text(".2f"),
        over_without=figures["speed_over_without"].text(),
        over_raw=figures["speed_over_raw"].text(),
        over_raw_DDP=figures["speed_over_raw_ddp"].text(),
        noise=figures["speed_over_itself"].text(),
    )
