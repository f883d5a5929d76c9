"""A step of shardkit's Trainer over one of the transformers library's own, under the same backend, on two ranks."""

from __future__ import annotations

import pytest
from _measure import Quartiles, ratios, replayed, report, tell
from _trainer import Arm, deepspeed_file, measure

pytestmark = replayed

LENGTH, BATCH = 20, 4

ARMS = {
    "ddp": (Arm("own", False, {}), Arm("shardkit", True, {"strategy": "ddp"})),
    "deepspeed stage 2": (
        Arm("own", False, {"deepspeed": deepspeed_file(sizes=True)}),
        Arm("shardkit", True, {"deepspeed": deepspeed_file(sizes=True)}),
    ),
    "deepspeed stage 2, each with its own buckets": (
        Arm("own", False, {"deepspeed": deepspeed_file(sizes=False)}),
        Arm("shardkit", True, {"deepspeed": deepspeed_file(sizes=False)}),
    ),
    "--sharded_ddp over the library's ddp": (Arm("own", False, {}), Arm("shardkit", True, {"sharded_ddp": True})),
}
SAME = ("ddp", "deepspeed stage 2")
"""Where both have the same backend at the same settings."""

LIMIT = 1.02
"""How many times as long a step may take there, over what the library's own takes over itself."""


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("backend", ARMS)
def test_a_step_of_the_trainer(benchmark, blocks, processor, backend, accumulate):
    """A step over the same step by the library's own Trainer; the latter over itself is the noise."""
    own, ours = (
        Arm(arm.name, arm.ours, {**arm.arguments, "gradient_accumulation_steps": accumulate}) for arm in ARMS[backend]
    )
    again = Arm("own again", own.ours, own.arguments)
    seconds = measure([own, ours, again], blocks=blocks, length=LENGTH, batch=BATCH, processor=processor)
    over = ratios(seconds["shardkit"], seconds["own"])
    noise = ratios(seconds["own again"], seconds["own"])
    report(benchmark, seconds["shardkit"], shardkit_over_own=over, own_over_itself=noise)
    clock = ", in time of the processor" if processor else ""
    tell(
        f"a step of the Trainer: t5-tiny, 2 ranks, batch {BATCH} each{clock}",
        backend=backend,
        accumulate=str(accumulate),
        milliseconds_own=f"{1e3 * Quartiles.of(seconds['own']).median:.1f}",
        milliseconds_shardkit=f"{1e3 * Quartiles.of(seconds['shardkit']).median:.1f}",
        shardkit_over_own=over.text(),
        noise=noise.text(),
    )
    if backend in SAME:
        assert over.median <= LIMIT * max(noise.median, 1.0)
