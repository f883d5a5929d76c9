"""What an optimizer may have done instead of what it was told: rules to try on a trace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkit.parity._case import Case
from shardkit.parity._comparable import accumulations, world_sizes
from shardkit.parity._factors import readings, rounded
from shardkit.parity._replay import Replay, Rule

_BETAS = ((0.9, 0.999), (0.9, 0.99), (0.9, 0.98), (0.9, 0.95), (0.0, 0.999), (0.95, 0.999))
_EPS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_DECAYS = (1e-5, 1e-4, 5e-4, 1e-3, 1e-2, 5e-2, 1e-1)
_MOMENTA = (0.9, 0.95, 0.99, 0.5, 0.8)

_LOWEST = 1e-3
"""The lowest limit that is looked for, as a share of the smallest gradient norm."""
_SHARP = 1.01
"""By what factor another limit must not fit as well, for one to be told as a number and not as about one."""

_POINTS = 12
"""How many limits are tried for each factor of ten, before the best is refined."""


class Hypothesis(NamedTuple):
    """A rule, the diagnosis that it stands for, and what was done in words."""

    name: str
    words: str
    rule: Rule
    evidence: dict[str, Any]


def hypotheses(case: Case, rule: Rule, other: Rule | None) -> Iterator[Hypothesis]:
    """Yield rules that a run may have followed instead of ``rule``, those that are seen most first."""
    if rule.max_norm is not None:
        loose = dataclasses.replace(rule, max_norm=None)
        evidence = {"max_norm": rule.max_norm}
        yield Hypothesis("clipping did not act", f"its gradients are not clipped to {rule.max_norm:g}", loose, evidence)
    for limit in _limits(case):
        if limit != rule.max_norm:
            yield _clipped(rule, limit)
    yield from _modes(rule)
    for words, changed in (
        ("a parameter without a gradient is stepped as with one of zeros", {"zeros": True}),
        ("frozen parameters are stepped too", {"everywhere": True}),
    ):
        trial = dataclasses.replace(rule, **changed)  # type: ignore[arg-type]
        yield Hypothesis("decay on unused parameters", words, trial, {})
    yield from _settings(rule)
    for factor in _scales(case):
        for reading in readings(case, factor):
            words = f"its gradients were multiplied by {reading.words} before the step"
            trial = dataclasses.replace(rule, scale=factor)
            yield Hypothesis(reading.name, words, trial, {"factor": rounded(factor)})
    if other is not None and other != rule:
        yield Hypothesis("optimizer mode", "it is stepped as the other run tells", other, {"optimizer": other.kind})


def solved(replay: Replay, rule: Rule) -> Hypothesis | None:
    """Return the limit of the gradient norm that explains a run's steps best; None if none does."""
    norms = [float(norm) for norm in replay.norm if 0 < float(norm) < math.inf]
    if not norms:
        return None
    highest, lowest = math.log10(max(norms)), math.log10(min(norms) * _LOWEST)
    count = max(2, round((highest - lowest) * _POINTS))
    points = [highest + (lowest - highest) * at / count for at in range(count + 1)]

    def miss(point: float) -> float:
        found = replay.misfit(dataclasses.replace(rule, max_norm=10**point))
        return float(found.clamp_max(10.0).mean())

    found = [miss(point) for point in points]
    best = min(range(len(points)), key=found.__getitem__)
    left, right = points[max(best - 1, 0)], points[min(best + 1, count)]
    for _ in range(40):
        third = (right - left) / 3
        if miss(left + third) < miss(right - third):
            right -= third
        else:
            left += third
    limit = 10 ** ((left + right) / 2)
    trial = _clipped(rule, float(f"{limit:.4g}"))
    if not replay.fits(trial.rule):
        trial = _clipped(rule, limit)
    if not replay.fits(trial.rule):
        return None
    if not any(replay.fits(_clipped(rule, limit * factor).rule) for factor in (1 / _SHARP, _SHARP)):
        return trial
    # The optimizer sees little of a constant factor: any limit below all norms does about the same.
    most = rounded(min(norms))
    near = not replay.fits(_clipped(rule, limit / 2).rule)
    if near or miss(math.log10(limit)) < 0.1 * miss(math.log10(limit / 2)):
        words = f"its gradients are clipped, to a norm of about {limit:.2g}"
        return trial._replace(words=words, evidence={"max_norm about": float(f"{limit:.2g}"), "max_norm at most": most})
    return trial._replace(
        words=f"its gradients are clipped, to a norm of {most:.3g} or less", evidence={"max_norm at most": most}
    )


def _clipped(rule: Rule, limit: float) -> Hypothesis:
    trial, told = dataclasses.replace(rule, max_norm=limit), float(f"{limit:.4g}")
    return Hypothesis("clipping acted", f"its gradients are clipped to norm {told:g}", trial, {"max_norm": told})


def _limits(case: Case) -> list[float]:
    """Return the limits that any setting of either run tells."""
    found: list[float] = []
    for trace in (case.pair.a, case.pair.b):
        settings = {**(trace.facts.get("settings") or {}), **(trace.facts.get("configuration") or {})}
        for name, value in settings.items():
            told = any(word in name.lower() for word in ("clip", "max_norm", "grad_norm"))
            if told and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
                found.append(float(value))
    return list(dict.fromkeys(found))


def _modes(rule: Rule) -> Iterator[Hypothesis]:
    if rule.kind in ("Adam", "AdamW"):
        kind = "AdamW" if rule.kind == "Adam" else "Adam"
        ways = {"Adam": "L2 decay, added to the gradient (Adam)", "AdamW": "decoupled decay (AdamW)"}
        yield Hypothesis(
            "optimizer mode",
            f"its weights follow {ways[kind]}, and its facts tell of {ways[rule.kind]}",
            rule.turned(kind),
            {"optimizer": kind},
        )
    for kind in ("SGD", "Adam", "AdamW"):
        if kind != rule.kind and {kind, rule.kind} != {"Adam", "AdamW"}:
            words = f"its weights follow {kind}, and its facts tell of {rule.kind}"
            yield Hypothesis("optimizer mode", words, rule.turned(kind), {"optimizer": kind})
    decays = [group.get("weight_decay", 0.0) for group in rule.groups]
    if any(decays):
        yield _mode("without weight decay", rule.but(weight_decay=0.0), {"weight_decay": 0.0})
    if len(set(decays)) > 1:
        for value in dict.fromkeys(decays):
            if value:
                yield _mode(
                    f"with weight decay {value:g} for all groups", rule.but(weight_decay=value), {"weight_decay": value}
                )


def _settings(rule: Rule) -> Iterator[Hypothesis]:
    for name, values in (
        ("momentum", (0.0, *_MOMENTA)),
        ("nesterov", (True, False)),
        ("dampening", (0.0, 0.9)),
        ("betas", _BETAS),
        ("amsgrad", (True, False)),
        ("eps", _EPS),
        ("weight_decay", _DECAYS),
        ("alpha", (0.9, 0.99)),
    ):
        held = [group.get(name) for group in rule.groups]
        if held[0] is None:
            continue
        for value in values:
            if all(value == one for one in held):
                continue
            if name == "nesterov" and value and not all(group.get("momentum") for group in rule.groups):
                continue
            if name == "momentum" and not value:
                trial = rule.but(momentum=0.0, nesterov=False)
            else:
                trial = rule.but(**{name: value})
            yield _mode(f"with {name} {value}, where its facts tell of {held[0]}", trial, {name: value})


def _mode(words: str, rule: Rule, evidence: dict[str, Any]) -> Hypothesis:
    return Hypothesis("optimizer mode", f"its weights follow {rule.kind} {words}", rule, evidence)


def _scales(case: Case) -> list[float]:
    sizes = sorted(world_sizes(case.pair) | accumulations(case.pair))
    return list(dict.fromkeys(value for size in sizes for value in (size, 1 / size, size**0.5, size**-0.5)))
