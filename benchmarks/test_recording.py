"""What recording a trace adds to a step of the T5 that the commands train, on two ranks."""

from __future__ import annotations

import pytest
from _loops import Arm, recorded, session
from _measure import STRATEGIES, Quartiles, ratios, replayed, report, tell
from _ranks import measure_blocks

pytestmark = replayed

WORKLOAD = "built-in t5-tiny"
BATCH = 8
BLOCKS, LENGTH = 40, 4

LIMIT = 1.10
"""How many times as long a step may take while it is recorded at the default detail."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recording_of_session(benchmark, strategy):
    """A step that is recorded, over the same step that isn't; the latter over itself is the noise."""
    arms = [
        Arm("session", session(strategy)),
        Arm("session again", session(strategy)),
        Arm("recorded", recorded(strategy)),
    ]
    seconds = measure_blocks(arms, WORKLOAD, BATCH, blocks=BLOCKS, length=LENGTH)
    over = ratios(seconds["recorded"], seconds["session"])
    noise = ratios(seconds["session again"], seconds["session"])
    report(benchmark, seconds["recorded"], recorded_over_session=over, session_over_itself=noise)
    tell(
        f"seconds of a step: {WORKLOAD}, 2 ranks, batch {BATCH} each",
        strategy=strategy,
        milliseconds=f"{1e3 * Quartiles.of(seconds['session']).median:.1f}",
        recorded_over_session=over.text(),
        noise=noise.text(),
    )
    assert over.median <= LIMIT
