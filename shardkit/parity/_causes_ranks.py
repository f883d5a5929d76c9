"""Causes that show on single ranks, or in single parameters: what isn't averaged, and what doesn't move."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardkit.parity._case import Case
from shardkit.parity._factors import rounded
from shardkit.parity._results import Diagnosis
from shardkit.parity._roundoff import GRADIENT, SHARE
from shardkit.parity._sketch import ABSENT, ELEMENTS, SQUARE, SUMS, norm_of_sums
from shardkit.parity._trace import Trace


def local_gradients(case: Case) -> Iterator[Diagnosis]:
    """Ranks that hold different gradients, or weights, where the other run's hold the same."""
    parting = case.parting
    if parting is None:
        return
    step = parting.step - 1
    spread = [_spread(trace.gradients[step]) for trace in (case.pair.a, case.pair.b)]
    for side, own, other in (("b", spread[1], spread[0]), ("a", spread[0], spread[1])):
        names = _differing(case, side, own, other, GRADIENT)
        if names:
            trace = case.pair.b if side == "b" else case.pair.a
            ranks = _odd_ranks(trace.gradients[step], trace.parameters.index(names[0]))
            sentence = (
                f"the gradient of {_list(names)} is not averaged in run {side.upper()}: "
                f"{'each rank holds' if len(ranks) == trace.ranks else f'{_ranks(ranks)} {_holds(ranks)}'} its own"
            )
            yield Diagnosis("local gradient", sentence, _evidence(step, names, ranks))
            return
    spread = [_spread(trace.weights[step + 1]) for trace in (case.pair.a, case.pair.b)]
    for side, own, other in (("b", spread[1], spread[0]), ("a", spread[0], spread[1])):
        trace = case.pair.b if side == "b" else case.pair.a
        names = _differing(case, side, own, other, 1e-6)
        names = [name for name in names if not _still_ranks(trace, trace.parameters.index(name), step)]
        if names:
            ranks = _odd_ranks(trace.weights[step + 1], trace.parameters.index(names[0]))
            sentence = (
                f"the ranks of run {side.upper()} hold different weights of {_list(names)} after step {step + 1}: each "
                "went its own way, so its gradient was not averaged, or its weight not shared"
            )
            yield Diagnosis("local gradient", sentence, _evidence(step, names, ranks))
            return


def stale(case: Case) -> Iterator[Diagnosis]:
    """Weights that stay where they were, on a rank or in a run, while they move elsewhere by a gradient."""
    parting = case.parting
    if parting is not None and parting.quantity == "gradient":
        yield from _without_gradient(case, parting.step - 1)
    if parting is None or parting.quantity != "weight":
        return
    step = parting.step - 1
    if not bool(case.pair.a.applied[step]) or not bool(case.pair.b.applied[step]):
        return
    names = case.pair.names
    pulled = case.pair.gradient_norms[0][step] > 0
    for side, trace, other in (("b", case.pair.b, case.pair.a), ("a", case.pair.a, case.pair.b)):
        found: list[tuple[str, list[int]]] = []
        for at, name in enumerate(names):
            place, there = trace.parameters.index(name), other.parameters.index(name)
            ranks = _still_ranks(trace, place, step)
            if ranks and bool(pulled[at]) and not _still_ranks(other, there, step):
                found.append((name, ranks))
        moved = any(not _still_ranks(trace, at, step) for at in range(len(names)))
        if found and moved:
            still = [name for name, _ in found]
            ranks = found[0][1]
            everywhere = len(ranks) == trace.weights.shape[1]
            where = f"in run {side.upper()}" if everywhere else f"on {_ranks(ranks)} of run {side.upper()}"
            sentence = (
                f"the weight of {_list(still)} does not move {where}, though it has a gradient and moves "
                f"{'in the other run' if everywhere else 'on the others'}"
            )
            yield Diagnosis("stale parameter", sentence, _evidence(step, still, [] if everywhere else ranks))
            return


def _without_gradient(case: Case, step: int) -> Iterator[Diagnosis]:
    """Yield that parameters have no gradient in one run, if nothing else parts."""
    apart = case.bound.gradient[step]
    for side, has in zip("ab", case.pair.has_gradient, strict=True):
        if bool((apart & ~has[step]).any()) and not bool((apart & has[step]).any()):
            names = [case.pair.names[at] for at in apart.nonzero().flatten().tolist()]
            where = f"run {side.upper()}, and one in the other run"
            sentence = f"{_list(names)} has no gradient in {where}: it is not trained there"
            yield Diagnosis("stale parameter", sentence, _evidence(step, names, []))


def unused(case: Case) -> Iterator[Diagnosis]:
    """Parameters without a gradient that move in one run only."""
    parting = case.parting
    if parting is None or parting.quantity != "weight":
        return
    pair, step = case.pair, parting.step - 1
    idle = ~((pair.gradient_norms[0][: step + 1] > 0) | (pair.gradient_norms[1][: step + 1] > 0)).any(0)
    for side, other, trace in (("b", pair.a, pair.b), ("a", pair.b, pair.a)):
        found = []
        for at in idle.nonzero().flatten().tolist():
            place, there = trace.parameters.index(pair.names[at]), other.parameters.index(pair.names[at])
            kept = _kept(trace, place, step)
            if kept is not None and _still_ranks(other, there, step):
                found.append((pair.names[at], kept))
        if found:
            names = [name for name, _ in found]
            frozen = not trace.facts["parameters"][names[0]].get("trainable", True)
            sentence = (
                f"{_list(names)} {'is frozen' if frozen else 'has no gradient'}, and shrinks in run {side.upper()} all "
                "the same: weight decay acts on it"
            )
            evidence = _evidence(step, names, []) | {"kept of the weight": found[0][1]}
            yield Diagnosis("decay on unused parameters", sentence, evidence)
            return


def _spread(rows: Tensor) -> Tensor:
    """Return how far the ranks are apart in each parameter, ``(P,)``, of sketches ``(R, P, WIDTH)``."""
    if len(rows) == 1:
        return torch.zeros(rows.shape[1], dtype=torch.float64)
    present = rows[..., SQUARE] != ABSENT
    rows = rows.masked_fill(~present.unsqueeze(-1), 0.0)
    apart = norm_of_sums((rows - rows[:1])[..., SUMS]).amax(0)
    norms = rows[..., SQUARE].sqrt()
    scale = torch.maximum(norms.amax(0), SHARE * norms.square().sum(1).sqrt().max())
    return torch.where(apart == 0, 0.0, (apart / scale).nan_to_num(0.0))


def _differing(case: Case, side: str, own: Tensor, other: Tensor, least: float) -> list[str]:
    trace, there = (case.pair.b, case.pair.a) if side == "b" else (case.pair.a, case.pair.b)
    apart = {name: float(value) for name, value in zip(there.parameters, other, strict=True)}
    found = zip(trace.parameters, own.tolist(), strict=True)
    return [name for name, value in found if value > least and value > 10 * apart[name]]


def _odd_ranks(rows: Tensor, place: int) -> list[int]:
    """Return the ranks that hold something else than most; all where no two hold the same."""
    values = rows[:, place]
    same = [sum(bool(one.equal(other)) for other in values) for one in values]
    most = max(same)
    if most == 1:
        return list(range(len(values)))
    return [rank for rank, count in enumerate(same) if count < most]


def _still_ranks(trace: Trace, place: int, step: int) -> list[int]:
    """Return the ranks on which a weight is after a step what it was at the start, to the last bit."""
    first, now = trace.weights[0, :, place], trace.weights[step + 1, :, place]
    return [rank for rank in range(len(first)) if bool(first[rank].equal(now[rank]))]


def _kept(trace: Trace, place: int, step: int) -> float | None:
    """Return what factor a weight was multiplied by since the start; None if it is the same, or no multiple."""
    first, now = trace.weights[0, 0, place, ELEMENTS], trace.weights[step + 1, 0, place, ELEMENTS]
    below = float((first * first).sum())
    if not below or bool(first.equal(now)):
        return None
    factor = float((first * now).sum()) / below
    rounding = 2.0**-24 * (step + 2) * first.abs()
    return rounded(factor) if bool(((now - factor * first).abs() <= rounding).all()) and factor < 1 else None


def _evidence(step: int, names: list[str], ranks: list[int]) -> dict[str, object]:
    found: dict[str, object] = {"step": step + 1, "parameters": names}
    return found | {"ranks": ranks} if ranks else found


def _list(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _holds(ranks: list[int]) -> str:
    return "hold" if len(ranks) > 1 else "holds"
