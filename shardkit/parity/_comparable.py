"""Whether two runs are comparable: all in which they differ before any number is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
    found = list(_mappings("model", one, other))
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
            yield Difference(kind, prefix + name, one.get(name), other.get(name), missing)
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
    seen = bool((one != 0).any()), bool((other != 0).any())
    if seen[0] != seen[1]:
        yield Difference("data", "fingerprints", seen[0] or None, seen[1] or None, "a" if seen[1] else "b")
        return
    same = doubled(pair.a), doubled(pair.b)
    if same[0] != same[1]:
        yield Difference("data", "all ranks read the same batch", *same)
    differing = (one != other).nonzero().flatten().tolist()
    if differing:
        at, found = differing[0], order(pair)
        what = f"batch of step {at + 1}"
        if found is not None and found.ahead:
            what = f"the same batches, of which {found.ahead} is {found.steps} ahead: {what}"
        elif found is not None:
            what = f"the same batches in another order: {what}"
        yield Difference("data", what, hexadecimal(one[at]), hexadecimal(other[at]))
        return
    left, right = pair.a.batches[: pair.steps], pair.b.batches[: pair.steps]
    if left.shape != right.shape or left.equal(right):
        return
    if left.flatten(1).sort(1).values.equal(right.flatten(1).sort(1).values):
        at = int((left != right).flatten(1).any(1).nonzero()[0])
        what = f"which rank reads which batch, first in step {at + 1}"
        yield Difference("data", what, _table(left[at]), _table(right[at]))


def _table(batches: Tensor) -> list[list[str]]:
    return [[hexadecimal(batch) for batch in row] for row in batches]


class Order(NamedTuple):
    """The same batches at other steps: of ``ahead``, a or b, so many steps ahead; or else in another order."""

    ahead: str
    steps: int
    first: int
    """The first step, from 1, at which they are not the same."""


def order(pair: Pair) -> Order | None:
    """Return in which order runs read the same batches; None where they read others."""
    one, other = pair.a.data, pair.b.data
    first = int((one[: pair.steps] != other[: pair.steps]).nonzero()[0]) + 1
    for steps in range(1, pair.steps - 1):
        for ahead, late, early in (("b", one, other), ("a", other, one)):
            common = min(len(late) - steps, len(early))
            if common >= 2 and late[steps:][:common].equal(early[:common]) and len(early[:common].unique()) > 1:
                return Order(ahead, steps, first)
    same = one[: pair.steps].sort().values.equal(other[: pair.steps].sort().values)
    return Order("", 0, first) if same else None


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
