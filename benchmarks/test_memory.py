"""The peak of memory of ``prepare`` and three steps, over the raw backend at its best settings and its defaults."""

from __future__ import annotations

import statistics

import pytest
from _loops import BEST, DEFAULT, PEERS, Arm, session
from _measure import STRATEGIES, needs_peers, ratios, replayed, report, tell
from _ranks import measure_peaks

pytestmark = replayed

TOLERANCE = 0.02
"""How much the raw loop may differ from itself; the column ``raw again`` says how much it does."""

WORKLOAD = "t5-small"
BATCHES = (1, 4)
MIB = 2**20


@pytest.mark.parametrize("batch", BATCHES, ids="batch-{}".format)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peak_of_session(benchmark, repeats, strategy, batch):
    """A session holds no more than the loop by hand over the backend at the best settings that were measured."""
    if strategy not in BEST:
        pytest.fail(f"no loop by hand is written for strategy {strategy!r}: add it to _loops.BEST")
    arms = (
        Arm("raw", BEST[strategy]),
        Arm("raw again", BEST[strategy]),
        Arm("raw at its defaults", DEFAULT[strategy]),
        Arm("shardkit", session(strategy)),
    )
    peaks, seconds = _peaks(arms, batch, repeats)
    over = {name: ratios(peaks[name], peaks["raw"]) for name in peaks}
    report(benchmark, seconds["shardkit"], peaks_bytes=peaks, **{f"{name}, over raw": over[name] for name in over})
    tell(
        f"MiB of the fuller rank above its base: {WORKLOAD}, batch {batch}",
        strategy=strategy,
        raw=_mib(peaks["raw"]),
        raw_at_its_defaults=_mib(peaks["raw at its defaults"]),
        shardkit=_mib(peaks["shardkit"]),
        shardkit_over_raw=over["shardkit"].text(),
        shardkit_over_defaults=ratios(peaks["shardkit"], peaks["raw at its defaults"]).text(),
        raw_again_over_raw=over["raw again"].text(),
    )
    assert over["shardkit"].median <= 1 + TOLERANCE, f"{strategy} holds {over['shardkit'].text()} of the raw peak"


@needs_peers
@pytest.mark.parametrize("batch", BATCHES, ids="batch-{}".format)
@pytest.mark.parametrize("peer", PEERS)
def test_peak_of_peer(benchmark, repeats, peer, batch):
    """What the peers hold on the same data, over the raw loop of DistributedDataParallel at its best settings."""
    arms = (Arm("raw", BEST["ddp"]), Arm(peer, PEERS[peer]), Arm("shardkit", session("ddp")))
    peaks, seconds = _peaks(arms, batch, repeats)
    over = ratios(peaks[peer], peaks["raw"])
    report(benchmark, seconds[peer], peaks_bytes=peaks, over_raw=over)
    tell(
        f"MiB of the fuller rank above its base: peers on DDP, {WORKLOAD}, batch {batch}",
        peer=peer,
        raw=_mib(peaks["raw"]),
        peak=_mib(peaks[peer]),
        shardkit=_mib(peaks["shardkit"]),
        peer_over_raw=over.text(),
        shardkit_over_peer=ratios(peaks["shardkit"], peaks[peer]).text(),
    )


def _peaks(arms: tuple[Arm, ...], batch: int, repeats: int) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return peaks in bytes, and seconds, of each arm's trials."""
    trials = measure_peaks(arms, WORKLOAD, batch, repeats=repeats)
    return (
        {name: [peak for peak, _ in pairs] for name, pairs in trials.items()},
        {name: [seconds for _, seconds in pairs] for name, pairs in trials.items()},
    )


def _mib(peaks: list[int]) -> str:
    return f"{statistics.median(peaks) / MIB:.0f}"
