"""Causes that lie around the arithmetic: data, start, schedule, skipped steps, races, settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardkit.parity._case import Case
from shardkit.parity._comparable import accumulations, doubled, order, world_sizes
from shardkit.parity._factors import rounded
from shardkit.parity._parting import partings
from shardkit.parity._results import Diagnosis
from shardkit.parity._roundoff import Bound

_MOST_AHEAD = 16
"""How many times as fast a schedule may run, at most."""


def races(case: Case) -> Iterator[Diagnosis]:
    """A run that differs from another run of itself."""
    if case.itself is None:
        return
    first, beyond = partings(case.itself, Bound(case.itself), None)
    found = beyond or first
    if found is None:
        return
    where = f"{found.quantity}{' of ' + found.parameter if found.parameter else ''}"
    evidence = {"step": found.step, "quantity": found.quantity, "relative": rounded(found.relative)}
    if found.parameter:
        evidence["parameter"] = found.parameter
    sentence = f"run A differs from another run of itself, first in step {found.step} in the {where}"
    sentence += ": a race" if beyond else " by round-off: sums are added up in changing order"
    yield Diagnosis("race", sentence, evidence, "certain" if beyond else "likely")


def data(case: Case) -> Iterator[Diagnosis]:
    """Other batches."""
    if case.parting is None:
        return
    same = doubled(case.pair.a), doubled(case.pair.b)
    if case.parting.quantity != "data":
        return
    evidence = {"step": case.parting.step}
    if same[0] != same[1]:
        side = "b" if same[1] else "a"
        yield Diagnosis("data", f"all ranks of run {side.upper()} read the same batch in every step", evidence)
        return
    found = order(case.pair)
    if found is None:
        sentence = f"the runs read other batches, first in step {case.parting.step}"
    elif found.ahead:
        sentence = f"the runs read the same batches, and {found.ahead} is {found.steps} ahead"
        evidence["ahead"] = found.steps
    else:
        sentence = f"the runs read the same batches in another order, first in step {case.parting.step}"
    yield Diagnosis("data", sentence, evidence)


def start(case: Case) -> Iterator[Diagnosis]:
    """Other weights before the first step."""
    parting = case.parting
    if parting is not None and parting.quantity == "weights before the first step":
        sentence = f"the runs start from other weights: {parting.count} parameters differ, {parting.parameter} the most"
        yield Diagnosis(
            "start weights", sentence, {"parameter": parting.parameter, "relative": rounded(parting.relative)}
        )


def schedules(case: Case) -> Iterator[Diagnosis]:
    """Learning rates that are those of later steps, or others."""
    one, other = case.pair.a.rates, case.pair.b.rates
    steps = case.pair.steps
    if one.shape[1] != other.shape[1] or _same(one[:steps], other[:steps]):
        return
    for ahead, slow, fast in (("b", one, other), ("a", other, one)):
        for times in range(2, _MOST_AHEAD + 1):
            wanted = slow[::times]
            common = min(len(wanted), len(fast))
            if common > 1 and _changes(wanted[:common]) and _same(wanted[:common], fast[:common]):
                sentence = f"the learning rates of {ahead} are the other run's of {times} times as many steps"
                yield Diagnosis("schedule ran ahead", sentence + _why(case, times), {"times": times})
                return
        for shift in range(1, len(slow) - 1):
            common = min(len(slow) - shift, len(fast))
            if common > 1 and _changes(fast[:common]) and _same(slow[shift:][:common], fast[:common]):
                sentence = f"the learning rates of {ahead} are the other run's of {shift} step{'s' * (shift > 1)} later"
                yield Diagnosis("schedule ran ahead", sentence, {"shift": shift})
                return
    ratio = other[:steps] / one[:steps]
    at = int((one[:steps] != other[:steps]).any(1).nonzero()[0])
    if bool(torch.isfinite(ratio).all()) and _same(ratio, ratio[:1, :1].expand_as(ratio)):
        factor = rounded(float(ratio[0, 0]))
        yield Diagnosis(
            "learning rate", f"the learning rates of run B are run A's times {factor:g}", {"factor": factor}
        )
        return
    evidence: dict[str, Any] = {"step": at + 1, "a": one[at].tolist(), "b": other[at].tolist()}
    yield Diagnosis("learning rate", f"the learning rates differ, first in step {at + 1}", evidence)


def skips(case: Case) -> Iterator[Diagnosis]:
    """A step that moved the weights in one run only."""
    if case.parting is None:
        return
    step = case.parting.step - 1
    one, other = bool(case.pair.a.applied[step]), bool(case.pair.b.applied[step])
    if one == other:
        return
    side, held = ("b", case.pair.b) if one else ("a", case.pair.a)
    norm = float(held.gradient_norm[step].max())
    infinite = not bool(torch.isfinite(held.gradient_norm[step]).all())
    why = ": its gradients are not finite" if infinite else ""
    sentence = f"run {side.upper()} skipped step {step + 1}, which the other run took{why}"
    yield Diagnosis("step skipped", sentence, {"step": step + 1, "gradient norm": str(norm) if infinite else norm})


def settings(case: Case) -> Iterator[Diagnosis]:
    """Settings that differ, where nothing else explains the gap."""
    if case.parting is None:
        return
    kinds = ("optimizer", "strategy", "configuration")
    found = [item for item in case.differences if item.kind in kinds and not item.missing and item.what != "strategy"]
    found = [item for item in found if not item.what.startswith("number of settings")]
    if case.parting.quantity == "weight":
        # Of the same gradients: how the batch was cut has no part in it.
        found = [item for item in found if item.what != "accumulate"]
    if not found:
        return
    told = [f"{item.what} is {item.a} in run A and {item.b} in run B" for item in found[:3]]
    more = f", and {len(found) - 3} more differ" if len(found) > 3 else ""
    evidence = {item.what: {"a": item.a, "b": item.b} for item in found}
    yield Diagnosis("configuration", "; ".join(told) + more, evidence, "likely")


def _why(case: Case, times: int) -> str:
    reasons = []
    if times in world_sizes(case.pair):
        reasons.append("once per process")
    if times in accumulations(case.pair):
        reasons.append("once per micro-batch")
    return f": the schedule was stepped {' or '.join(reasons)}" if reasons else ""


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-9 * torch.maximum(one.abs(), other.abs())).all())


def _changes(rates: Tensor) -> bool:
    return not _same(rates, rates[:1].expand_as(rates))
