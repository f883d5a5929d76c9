"""placeholder until the comparison lands"""

from __future__ import annotations

from shardkit.parity._results import Comparison
from shardkit.parity._trace import Trace


def compare(a: Trace, b: Trace, *, again: Trace | None = None, names: tuple[str, str] = ("a", "b")) -> Comparison:
    same = a.losses.equal(b.losses) and a.weights.equal(b.weights)
    gap = float((a.loss - b.loss).abs().max())
    return Comparison(
        names[0],
        names[1],
        "identical" if same else "round-off" if gap < 1e-6 else "different",
        [],
        None,
        None,
        [],
        None,
        a.loss.tolist(),
        b.loss.tolist(),
        gap,
        None,
    )
