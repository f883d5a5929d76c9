"""Causes that show in what the optimizer made of the same gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardkit.parity._case import Case
from shardkit.parity._hypotheses import Hypothesis, hypotheses, solved
from shardkit.parity._replay import Replay, Rule
from shardkit.parity._results import Diagnosis


def updates(case: Case) -> Iterator[Diagnosis]:
    """What a run did to its weights that its facts don't tell; or if they do, which of its settings mattered."""
    if case.parting is None or case.parting.quantity != "weight":
        return
    if all(case.follow):
        yield from _as_told(case)
        return
    for side in (1, 0):
        rule, other = case.rules[side], case.rules[1 - side]
        replay = case.short_replays[side]
        if rule is None or case.follow[side] or replay.fits(rule):
            continue
        found = _explained(case, replay, rule, other)
        for place, hypothesis in enumerate(found):
            label = "b" if side else "a"
            rivals = {other.name for other in found} - {hypothesis.name}
            sentence = f"the weights of run {label.upper()} are not what its own settings give: {hypothesis.words}"
            evidence = {
                "run": label,
                "step": case.parting.step,
                "misfit as told": float(f"{replay.worst(rule):.2g}"),
                "misfit as diagnosed": float(f"{replay.worst(hypothesis.rule):.2g}"),
                **hypothesis.evidence,
                **(_clip_settings(case) if "clipping" in hypothesis.name else {}),
            }
            confident = "certain" if not rivals and place == 0 else "likely"
            yield Diagnosis(hypothesis.name, sentence, evidence, confident)  # type: ignore[arg-type]


def _explained(case: Case, replay: Replay, rule: Rule, other: Rule | None) -> list[Hypothesis]:
    """Return the first hypothesis of each name that gives the run's weights."""
    few = replay.narrowed(rule)
    found: dict[str, Hypothesis] = {}
    for hypothesis in hypotheses(case, rule, other):
        if hypothesis.name not in found and few.fits(hypothesis.rule) and replay.fits(hypothesis.rule):
            found[hypothesis.name] = hypothesis
    if not found:
        clipped = solved(few, dataclasses.replace(rule, max_norm=None))
        if clipped is not None and replay.fits(clipped.rule):
            found[clipped.name] = clipped
    return list(found.values())


def _as_told(case: Case) -> Iterator[Diagnosis]:
    """Both did as their settings tell, and these differ: which of them makes the difference?"""
    one, other = case.rules
    if one is None or other is None or case.parting is None:
        return
    replay = case.short_replays[1]
    if replay.fits(one):
        return
    if one.max_norm != other.max_norm and not replay.fits(dataclasses.replace(other, max_norm=one.max_norm)):
        tighter = other.max_norm is not None and (one.max_norm is None or other.max_norm < one.max_norm)
        name = "clipping acted" if tighter else "clipping did not act"
        told = [
            f"clips to {norm:g}" if norm is not None else "does not clip" for norm in (one.max_norm, other.max_norm)
        ]
        evidence = {"a": one.max_norm, "b": other.max_norm, "step": case.parting.step, **_clip_settings(case)}
        yield Diagnosis(name, f"run A {told[0]} and run B {told[1]}, as their settings tell", evidence)
    if one.kind != other.kind and not replay.fits(dataclasses.replace(other.turned(one.kind))):
        evidence = {"a": one.kind, "b": other.kind, "step": case.parting.step}
        yield Diagnosis("optimizer mode", f"run A trains with {one.kind} and run B with {other.kind}", evidence)
    elif (changed := _changed(one, other)) and one.members == other.members:
        matters = {name: values for name, values in changed.items() if not replay.fits(_with(other, one, name))}
        if matters:
            told = [f"{name} is {a} in run A and {b} in run B" for name, (a, b) in matters.items()]
            evidence = {name: {"a": a, "b": b} for name, (a, b) in matters.items()}
            yield Diagnosis("optimizer mode", "; ".join(told), evidence | {"step": case.parting.step})


def _changed(one: Rule, other: Rule) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for left, right in zip(one.groups, other.groups, strict=False):
        for name in left.keys() & right.keys():
            if left[name] != right[name]:
                found.setdefault(name, (left[name], right[name]))
    return dict(sorted(found.items()))


def _with(rule: Rule, source: Rule, name: str) -> Rule:
    pairs = zip(rule.groups, source.groups, strict=True)
    return dataclasses.replace(rule, groups=tuple({**group, name: other[name]} for group, other in pairs))


def _clip_settings(case: Case) -> dict[str, Any]:
    """Return the settings of a clip that differ, with both values."""
    found = {item.what: [item.a, item.b] for item in case.differences if "clip" in item.what.lower()}
    found |= {item.what: [item.a, item.b] for item in case.differences if item.what == "max_grad_norm"}
    return {"settings": found} if found else {}
