"""Whether two runs are comparable: all in which they differ before any number is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit.parity._pair import Pair
from shardkit.parity._results import Difference
from shardkit.parity._trace import Trace

_FIRST = 5
"""How many names of a long list are told."""

_ABSENT = object()


def model_differences(a: Trace, b: Trace) -> list[Difference]:
    """Return which parameters only one has, or of another shape: with any, the runs have nothing to compare."""
    one, other = ({name: held["shape"] for name, held in trace.facts["parameters"].items()} for trace in (a, b))
    found = [item for item in _mappings("model", one, other)]
    if len(found) > _FIRST:
        rest = f"and {len(found) - _FIRST} more parameters"
        found = [*found[:_FIRST], Difference("model", rest, len(one), len(other))]
    return found


def differences(pair: Pair) -> list[Difference]:
    """Return everything else in which two runs of one model differ, what matters first."""
    a, b = pair.a, pair.b
    return [
        *_lengths(a, b),
        *_data(pair),
        *_start(pair),
        *_trainable(a, b),
        *_mappings("seed", _fact(a, "seeds"), _fact(b, "seeds")),
        *_world(a, b),
        *_strategy(a, b),
        *_optimizer(a, b),
        *_configuration(a, b),
        *(
            item
            for kind, key in (("version", "versions"), ("environment", "environment"), ("device", "device"))
            for item in _mappings(kind, _fact(a, key), _fact(b, key))
        ),
    ]


def _fact(trace: Trace, name: str) -> dict[str, Any]:
    held = trace.facts.get(name)
    return held if isinstance(held, dict) else {}


def _mappings(kind: str, one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]):
        left, right = one.get(name, _ABSENT), other.get(name, _ABSENT)
        if left is _ABSENT or right is _ABSENT:
            missing = "a" if left is _ABSENT else "b"
            values = (None if value is _ABSENT else value for value in (left, right))
            yield Difference(kind, prefix + name, *values, missing=missing)
        elif left != right:
            yield Difference(kind, prefix + name, left, right)


def _lengths(a: Trace, b: Trace) -> Iterator[Difference]:
    if a.steps != b.steps:
        yield Difference("length", "steps", a.steps, b.steps)
    if a.facts.get("ended") != b.facts.get("ended"):
        yield Difference("length", "ended by an error", a.facts.get("ended"), b.facts.get("ended"))


def _world(a: Trace, b: Trace) -> Iterator[Difference]:
    if a.facts.get("world_size", a.ranks) != b.facts.get("world_size", b.ranks):
        yield Difference("world size", "ranks", a.facts.get("world_size", a.ranks), b.facts.get("world_size", b.ranks))


def _strategy(a: Trace, b: Trace) -> Iterator[Difference]:
    if a.facts.get("strategy") == b.facts.get("strategy"):
        return
    yield Difference("strategy", "strategy", a.facts.get("strategy"), b.facts.get("strategy"))
    one, other = ({**_fact(trace, "settings")} for trace in (a, b))
    options = one.pop("options", {}), other.pop("options", {})
    same_backend = a.facts.get("backend") == b.facts.get("backend")
    for held in (one, other):
        held.pop("seed", None)
        held.pop("backend", None)
    yield from _mappings("strategy", one, other)
    if same_backend and all(isinstance(held, dict) for held in options):
        yield from _mappings("strategy", *options, prefix="options.")


def _optimizer(a: Trace, b: Trace) -> Iterator[Difference]:
    one, other = _fact(a, "optimizer"), _fact(b, "optimizer")
    yield from _mappings("optimizer", {"class": one.get("class")}, {"class": other.get("class")})
    groups = one.get("groups", []), other.get("groups", [])
    if len(groups[0]) != len(groups[1]):
        yield Difference("optimizer", "groups", len(groups[0]), len(groups[1]))
        return
    for at, pair in enumerate(zip(*groups, strict=True)):
        yield from _mappings("optimizer", *pair, prefix=f"group {at + 1}: ")


def _trainable(a: Trace, b: Trace) -> Iterator[Difference]:
    one, other = ({name: p.get("trainable") for name, p in trace.facts["parameters"].items()} for trace in (a, b))
    found = [item for item in one if one[item] != other[item]]
    for name in found[:_FIRST]:
        yield Difference("optimizer", f"{name} is trainable", one[name], other[name])
    if len(found) > _FIRST:
        yield Difference("optimizer", f"and {len(found) - _FIRST} more parameters that only one trains")


def _configuration(a: Trace, b: Trace) -> Iterator[Difference]:
    one, other = _fact(a, "configuration"), _fact(b, "configuration")
    both = one.keys() & other.keys()
    yield from _mappings("configuration", {k: one[k] for k in one if k in both}, {k: other[k] for k in both})
    alone = len(one) - len(both), len(other) - len(both)
    related = a.facts.get("backend") == b.facts.get("backend") and 2 * len(both) >= min(len(one), len(other))
    if related:
        yield from _mappings(
            "configuration",
            {name: value for name, value in one.items() if name not in both},
            {name: value for name, value in other.items() if name not in both},
        )
    elif any(alone):
        yield Difference("configuration", "number of settings that only one has", *alone)


def _start(pair: Pair) -> Iterator[Difference]:
    places = pair.weight_apart[0].nonzero().flatten().tolist()
    norms = pair.weight_norms
    for at in places[:_FIRST]:
        yield Difference("start", pair.names[at], float(norms[0][0, at]), float(norms[1][0, at]))
    if len(places) > _FIRST:
        yield Difference("start", f"and {len(places) - _FIRST} more weights")


def _data(pair: Pair) -> Iterator[Difference]:
    one, other = pair.a.data[: pair.steps], pair.b.data[: pair.steps]
    if bool((one == 0).all()) != bool((other == 0).all()):
        yield Difference("data", "fingerprints", *(bool((value != 0).any()) or None for value in (one, other)))
        return
    same = doubled(pair.a), doubled(pair.b)
    if same[0] != same[1]:
        yield Difference("data", "all ranks read the same batch", *same)
    differing = (one != other).nonzero().flatten().tolist()
    if differing:
        at = differing[0]
        what, left, right = order(pair) or (f"batch of step {at + 1}", hexadecimal(one[at]), hexadecimal(other[at]))
        yield Difference("data", what, left, right)
        return
    left_batches, right_batches = pair.a.batches[: pair.steps], pair.b.batches[: pair.steps]
    if left_batches.shape == right_batches.shape and not left_batches.equal(right_batches):
        if left_batches.flatten(1).sort(1).values.equal(right_batches.flatten(1).sort(1).values):
            at = int((left_batches != right_batches).flatten(1).any(1).nonzero()[0])
            found = (
                [[hexadecimal(batch) for batch in row] for row in batches[at]]
                for batches in (left_batches, right_batches)
            )
            yield Difference("data", f"which rank reads which batch, first in step {at + 1}", *found)


def order(pair: Pair) -> tuple[str, Any, Any] | None:
    """Return how batches differ, with a word for each run, where they are the same ones at other steps."""
    one, other = pair.a.data, pair.b.data
    shifts = [shift for size in range(1, pair.steps - 1) for shift in (size, -size)]
    for shift in shifts:
        left, right = (one[shift:], other) if shift > 0 else (one, other[-shift:])
        common = min(len(left), len(right))
        if common >= 2 and left[:common].equal(right[:common]) and len(left[:common].unique()) > 1:
            ahead = f"{abs(shift)} step{'s' * (abs(shift) > 1)} ahead"
            return "batches at other steps", ahead if shift < 0 else None, ahead if shift > 0 else None
    one, other = one[: pair.steps], other[: pair.steps]
    if one.sort().values.equal(other.sort().values):
        at = int((one != other).nonzero()[0])
        return "the same batches in another order", f"as recorded, up to step {at}", f"another from step {at + 1} on"
    return None


def doubled(trace: Trace) -> bool:
    """Return whether all ranks read the same batch at every step."""
    batches = trace.batches
    return trace.ranks > 1 and bool((batches[:, :1] == batches).all()) and bool((batches != 0).any())


def hexadecimal(value: Tensor) -> str:
    """Return a fingerprint as it is shown."""
    return f"{int(value) & (2**64 - 1):016x}"


def world_sizes(pair: Pair) -> set[int]:
    """Return the numbers of ranks of both runs, but 1."""
    return {int(trace.facts.get("world_size", trace.ranks)) for trace in (pair.a, pair.b)} - {1}


def accumulations(pair: Pair) -> set[int]:
    """Return the numbers of micro-batches in a step of both runs, but 1."""
    counts = (int((~torch.isnan(trace.losses)).sum(2).max()) for trace in (pair.a, pair.b))
    return {*counts} - {0, 1}
