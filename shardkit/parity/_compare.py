"""Compare two traces: whether they may be compared, where they part, how the gap grows, and why."""

from __future__ import annotations

from shardkit.errors import InputError
from shardkit.parity._case import Case
from shardkit.parity._comparable import differences, model_differences
from shardkit.parity._diagnose import diagnose
from shardkit.parity._gaps import final, gaps, same_bits
from shardkit.parity._pair import Pair
from shardkit.parity._results import Comparison, Difference
from shardkit.parity._trace import Trace


def compare(a: Trace, b: Trace, *, again: Trace | None = None) -> Comparison:
    """Compare run ``b`` with run ``a``: where they part, how the gap grows, and what the numbers say of the cause.

    ``again`` is another run of a's: how far it is from a is how far a run of this kind is from itself, and only what
    is beyond that counts as a difference of b. Steps that both runs have are compared.

    Raises:
        InputError: ``again`` is of another model, data, strategy, optimizer or length than a.
    """
    model = model_differences(a, b)
    if model or min(a.steps, b.steps) == 0:
        return _incomparable(a, b, model or [Difference("length", "steps", a.steps, b.steps)])
    pair = Pair(a, b)
    itself = None if again is None else _again(a, again)
    case = Case(pair, itself)
    found = final(a, b)
    if case.parting is not None:
        verdict = "different"
    elif case.first_bit is None and same_bits(a, b):
        verdict = "identical"
    else:
        verdict = "round-off"
    return Comparison(
        a=name_of(a),
        b=name_of(b),
        verdict=verdict,  # type: ignore[arg-type]
        differences=case.differences,
        first_bit=case.first_bit,
        parting=case.parting,
        diagnoses=diagnose(case),
        gaps=gaps(pair),
        loss_a=a.loss.tolist(),
        loss_b=b.loss.tolist(),
        final_weights=found[0],
        final_ulps=found[1],
    )


def _again(a: Trace, again: Trace) -> Pair:
    """Return a run and its repetition.

    Raises:
        InputError: they aren't of the same thing.
    """
    other = model_differences(a, again)
    pair = None if other else Pair(a, again)
    if pair is not None:
        other = [item for item in differences(pair) if item.kind in _SAME_AGAIN]
    if other or pair is None:
        raise InputError(
            f"again is another run of the same as a: its {other[0].kind} differs in {other[0].what}, "
            f"{other[0].a!r} and {other[0].b!r}"
        )
    return pair


_SAME_AGAIN = ("model", "length", "data", "start", "strategy", "optimizer", "world size")
"""In what a run and its repetition may not differ."""


def name_of(trace: Trace) -> str:
    """Return what a run is called: its strategy and ranks, and what of it was recorded."""
    ranks = trace.facts.get("world_size", trace.ranks)
    return f"{trace.facts.get('strategy', '?')}, {ranks} rank{'s' * (ranks != 1)}, {trace.steps} steps"


def _incomparable(a: Trace, b: Trace, found: list[Difference]) -> Comparison:
    return Comparison(
        a=name_of(a),
        b=name_of(b),
        verdict="incomparable",
        differences=found,
        first_bit=None,
        parting=None,
        diagnoses=[],
        gaps=None,
        loss_a=a.loss.tolist(),
        loss_b=b.loss.tolist(),
        final_weights=None,
        final_ulps=None,
    )
