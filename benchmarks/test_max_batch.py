"""The largest batch that trains within one budget of memory: each strategy, raw DDP, the raw library, the peers."""

from __future__ import annotations

import pytest
from _loops import BEST, DEFAULT, PEERS, Arm, ddp, session
from _measure import STRATEGIES, needs_peers, replayed, report, tell
from _ranks import largest_batch

pytestmark = replayed

WORKLOAD = "t5-short"
BUDGET = 768 * 2**20
"""Bytes of a rank: nearly seven times the weights, of which plain data parallel holds four to five at its peak."""

_known: dict[str, tuple[int, int]] = {}


def _largest(arm: Arm, key: str) -> int:
    """Return an arm's largest batch; one that several tests compare with is searched for once."""
    if key not in _known:
        _known[key] = largest_batch(arm, WORKLOAD, BUDGET)
    return _known[key][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_largest_batch_of_session(benchmark, strategy):
    """A session trains a batch as large as the raw library at its defaults does, and at the best known settings."""
    if strategy not in BEST:
        pytest.fail(f"no loop by hand is written for strategy {strategy!r}: add it to _loops.BEST")
    plain = _largest(Arm("raw DDP", ddp()), "ddp, defaults")
    defaults = _largest(Arm("raw at its defaults", DEFAULT[strategy]), f"{strategy}, defaults")
    best = _largest(Arm("raw", BEST[strategy]), f"{strategy}, best")
    found = _largest(Arm("shardkit", session(strategy)), f"{strategy}, shardkit")
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
    assert found >= max(best, defaults), f"{strategy} fits {found}, the raw library {best} or {defaults}"


@needs_peers
@pytest.mark.parametrize("peer", PEERS)
def test_largest_batch_of_peer(benchmark, peer):
    """The largest batch under a peer's wrapper of DistributedDataParallel, beside a session's and raw DDP's."""
    plain = _largest(Arm("raw DDP", ddp()), "ddp, defaults")
    found = _largest(Arm(peer, PEERS[peer]), peer)
    ours = _largest(Arm("shardkit", session("ddp")), "ddp, shardkit")
    report(benchmark, [float(found)], raw_ddp=plain, peer=found, shardkit=ours)
    tell(
        f"largest batch of a rank within {BUDGET // 2**20} MiB: peers on DDP, {WORKLOAD}, 2 ranks",
        peer=peer,
        raw_DDP=str(plain),
        largest_batch=str(found),
        shardkit=str(ours),
    )
    assert ours >= found
