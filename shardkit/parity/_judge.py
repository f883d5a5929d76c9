"""What a run's numbers are worth: its distance from a float64 reference, held against that of plain DDP.

No fixed tolerance is right for every model, length and machine: round-off grows with each. So the work itself says how
much of it there is: torch's own DDP is trained on it as well, and how far that ends up from the reference, in float32,
is the unit.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardkit.parity._compare import compare
from shardkit.parity._results import Comparison, Difference, Distances, Failure, Measured, Row
from shardkit.parity._runner import Ran
from shardkit.parity._trace import Trace

FACTOR = 4.0
"""How many times the own distance of the baseline, plain data-parallel torch, from the reference a strategy may
have.

Both are sums of the same float32 numbers in different orders, so each distance is a draw from about the same
distribution. On the four built-in workloads the largest ratio of any strategy was 1.35 (``shardkit parity run``, two
ranks, CPU, torch 2.13, November 2026); a wrong scale, a lost gradient, or another clipping is at 1000 and more.
"""

FLOOR = 2.0**-23
"""The least distance that the baseline is taken to have, an ULP of float32: its own may be 0 by luck."""


def measured(
    outcomes: Sequence[Ran | Failure],
    reference: Trace | None,
    baseline: Distances | None,
    probes: Sequence[Ran | Failure] = (),
) -> Measured:
    """Sum up the runs of one strategy: how far they are apart, and from the reference.

    ``probes`` are runs of other work, which are only to be the same among each other.
    """
    runs = [ran for ran in outcomes if isinstance(ran, Ran)]
    failure = next((ran for ran in outcomes if isinstance(ran, Failure)), None)
    if not runs:
        return Measured(failure)
    first = runs[0].trace
    others = [ran.trace for ran in runs[1:] if not same_bits(first, ran.trace)]
    quick = [ran.trace for ran in probes if isinstance(ran, Ran)]
    parted = [other for other in quick[1:] if not same_bits(quick[0], other)]
    apart = [*(compare(first, other) for other in others), *(compare(quick[0], other) for other in parted)]
    found = [distances(ran.trace, reference) for ran in runs] if reference is not None else []
    worst = _worst(found) if found else None
    speeds = [ran.samples_per_second for ran in runs if ran.samples_per_second]
    memory = zip(*(ran.peak_memory for ran in runs), strict=True)
    return Measured(
        failure,
        runs=len(runs),
        repeatable=not apart if max(len(runs), len(quick)) > 1 else None,
        self_comparison=max(apart, key=lambda one: _size(one.final_weights)) if apart else None,
        distances=worst,
        parity=None if worst is None or baseline is None else at_parity(worst, baseline),
        step_seconds=[ran.step_seconds for ran in runs],
        samples_per_second=statistics.median(speeds) if speeds else None,
        peak_memory=[int(statistics.median(rank)) for rank in memory],
        trace=first,
    )


def distances(trace: Trace, reference: Trace) -> Distances:
    """Return how far a run is from the reference; infinite where a value isn't finite, or the runs have other steps."""
    steps = min(trace.steps, reference.steps)
    loss, right = trace.loss[:steps], reference.loss[:steps]
    norm, right_norm = trace.gradient_norm[:steps, 0], reference.gradient_norm[:steps, 0]
    moved = apart = 0.0
    for name, value in reference.final_weights.items():
        own = trace.final_weights.get(name)
        if own is None or not value.is_floating_point() or own.shape != value.shape:
            continue
        apart += float((own.double() - value.double()).square().sum())
    sums = reference.weight_sums[-1, 0] - reference.weight_sums[0, 0]
    moved = float(sums.square().sum())
    ulp = torch.abs(torch.nextafter(right.float(), torch.tensor(math.inf)) - right.float()).double()
    return Distances(
        loss=_largest((loss - right).abs() / right.abs().clamp(min=1e-30)),
        gradient_norm=_largest((norm - right_norm).abs() / right_norm.abs().clamp(min=1e-30)),
        weights=_finite(math.sqrt(apart / moved)) if moved else (0.0 if not apart else math.inf),
        loss_ulps=_largest((loss - right).abs() / ulp),
    )


def at_parity(found: Distances, baseline: Distances) -> bool:
    return ratio(found, baseline) <= FACTOR


def ratio(found: Distances, baseline: Distances) -> float:
    """Return how many times plain DDP's distance a run's is, at the most: of losses, gradient norms and weights."""
    pairs = [
        (found.loss, baseline.loss),
        (found.gradient_norm, baseline.gradient_norm),
        (found.weights, baseline.weights),
    ]
    return max(own / max(plain, FLOOR) for own, plain in pairs)


def same_bits(one: Trace, other: Trace) -> bool:
    """Return whether two runs are the same in all that was recorded of numbers, to the last bit."""
    arrays = ("losses", "applied", "gradients", "weights")
    if any(not _equal(getattr(one, name), getattr(other, name)) for name in arrays):
        return False
    pairs = ((one.final_weights, other.final_weights), (one.whole_gradients, other.whole_gradients))
    return all(
        held.keys() == others.keys() and all(_equal(value, others[name]) for name, value in held.items())
        for held, others in pairs
    )


def single_row(strategy: str, control: bool, found: Measured, baseline: Distances | None) -> Row:
    """Return the row of a strategy in one environment."""
    verdict, reason = _single_verdict(found, baseline)
    return Row(strategy, control, verdict, reason, found)


def _single_verdict(found: Measured, baseline: Distances | None) -> tuple[str, str]:
    if found.failure is not None:
        return ("refused" if found.failure.stage == "refused" else "could not run"), found.failure.headline
    if found.repeatable is False and _apart(found):
        return "no parity", "it differs from itself in another process: a race"
    if found.distances is None or baseline is None:
        return "unjudged", "there is no reference to hold it against"
    times = ratio(found.distances, baseline)
    if times > FACTOR:
        return "no parity", f"it is {times:.3g} times as far from float64 as the baseline; at most {FACTOR:g} is parity"
    return "parity", "" if found.repeatable is not False else "its last bits differ from run to run"


def pair_row(strategy: str, control: bool, before: Measured, after: Measured, versions: Sequence[str]) -> Row:
    """Return the row of a strategy in two environments; ``versions`` are what their failures may differ in."""
    changed = changed_settings(before, after)
    if before.failure is not None or after.failure is not None:
        verdict, reason = _failed(before.failure, after.failure, versions)
        return Row(strategy, control, verdict, reason, before, after, changed=changed)
    assert before.trace is not None
    assert after.trace is not None
    found = _told_of_sides(compare(before.trace, after.trace))
    races = [name for name, side in (("before", before), ("after", after)) if side.repeatable is False and _apart(side)]
    if races:
        verdict, reason = "different", f"it differs from itself {' and '.join(races)}: a race"
    elif found.verdict == "identical":
        verdict, reason = "same", "identical to the last bit"
    elif found.verdict == "round-off":
        verdict, reason = "round-off", "the last bits differ, as by another order of additions"
    else:
        # Settings that changed are told beside it in any case.
        told = [one.sentence for one in found.diagnoses if one.name != "configuration"][:1]
        verdict, reason = "different", told[0] if told else _parted(found)
    if changed and verdict in ("same", "round-off"):
        verdict, reason = "different", f"{reason}, but settings changed: {_listed(changed)}"
    elif changed and not races:
        reason = f"{reason}; settings changed: {_listed(changed)}"
    return Row(
        strategy,
        control,
        verdict,
        reason,
        before,
        after,
        comparison=found,
        changed=changed,
        speed_ratio=_over(after.samples_per_second, before.samples_per_second),
        speed_spread=_spread(before, after),
        memory_ratio=_over(max(after.peak_memory, default=0), max(before.peak_memory, default=0)),
    )


def _told_of_sides(found: Comparison) -> Comparison:
    """Return a comparison that speaks of before and after."""
    told = [
        replace(one, sentence=one.sentence.replace("run A", "the run before").replace("run B", "the run after"))
        for one in found.diagnoses
    ]
    return replace(found, a="before", b="after", diagnoses=told)


def changed_settings(before: Measured, after: Measured) -> list[Difference]:
    """Return the resolved settings of the library that both sides have, with other values."""
    if before.trace is None or after.trace is None:
        return []
    old, new = (side.trace.facts.get("configuration", {}) for side in (before, after) if side.trace is not None)
    return [
        Difference("configuration", name, old[name], new[name])
        for name in old
        if name in new and old[name] != new[name]
    ]


def _listed(changed: Sequence[Difference]) -> str:
    told = ", ".join(f"{one.what} {one.a!r} -> {one.b!r}" for one in changed[:2])
    return told + (f" and {len(changed) - 2} more" if len(changed) > 2 else "")


def _failed(before: Failure | None, after: Failure | None, versions: Sequence[str]) -> tuple[str, str]:
    if before is not None and after is not None:
        same = _unversioned(before.headline, versions) == _unversioned(after.headline, versions)
        if same and before.stage == after.stage == "refused":
            return "refused", f"on both sides: {after.headline}"
        if same:
            return "could not run", f"on neither side: {after.headline}"
        return "could not run", f"before: {before.headline}; after: {after.headline}"
    side, failure = ("before", before) if before is not None else ("after", after)
    assert failure is not None
    return "could not run", f"{side}: {failure.headline}"


def _unversioned(text: str, versions: Sequence[str]) -> str:
    for version in versions:
        text = text.replace(version, "?")
    return re.sub(r"0x[0-9a-f]+", "?", text)


def _apart(found: Measured) -> bool:
    return found.self_comparison is not None and found.self_comparison.verdict == "different"


def _parted(found: Comparison) -> str:
    parting = found.parting
    if parting is None:
        return "the runs can't be compared"
    where = f" of {parting.parameter}" if parting.parameter else ""
    return f"they part at step {parting.step} in the {parting.quantity}{where}, by {parting.relative:.2g}"


def _worst(found: Sequence[Distances]) -> Distances:
    return Distances(
        loss=max(one.loss for one in found),
        gradient_norm=max(one.gradient_norm for one in found),
        weights=max(one.weights for one in found),
        loss_ulps=max(one.loss_ulps for one in found),
    )


def _spread(before: Measured, after: Measured) -> float | None:
    sides = [side.step_seconds for side in (before, after)]
    if min(map(len, sides)) < 2:
        return None
    return max((max(times) - min(times)) / statistics.median(times) for times in sides if statistics.median(times))


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def _size(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.inf


def _largest(values: Tensor) -> float:
    return _finite(float(values.max())) if values.numel() else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(1e300), other.nan_to_num(1e300))
