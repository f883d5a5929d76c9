"""From an optimizer's numbers to the names of parameters: said by somebody, or following from the shapes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from shardkit._imported import Imported
from shardkit.checkpoints._training import names_of
from shardkit.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import nn

HELP = (
    "hand over the model and the optimizer as they were built then, unprepared (model=, optimizer=; on the command "
    "line --workload), or the names of each group's parameters (names=; --names FILE), or, if each group was built in "
    "the order of the model's own parameters, names='order' (--names order)"
)
Shape = tuple[int, ...]

ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum", "prev"}
)
"""State of torch's optimizers that has a number for each of the parameter's."""
_MOST_WAYS = 10_000


class Named(NamedTuple):
    """The name of each of the optimizer's parameters, and who said so."""

    names: dict[Any, str]
    origin: str


def name_parameters(
    found: Imported,
    aliases: Mapping[str, str],
    shapes: Mapping[str, Shape],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    names: Sequence[Sequence[str]] | Literal["order"] | None,
) -> Named:
    """Return the name of each parameter that the optimizer's groups list.

    Raises:
        CheckpointError: a name isn't one of the model's or fits another shape, or nothing says what the names are.
    """
    assert found.optimizer is not None
    groups: list[Mapping[str, Any]] = list(found.optimizer["param_groups"])
    keys = [list(group["params"]) for group in groups]
    named, origin = _said(found, groups, keys, model, optimizer, names)
    known = _known_shapes(found.optimizer["state"], found.masters)
    if named is None:
        candidates = _candidates(found, shapes, model)
        if names == "order":
            named, origin = _in_order(keys, known, candidates), "the order of the model's own entries, as was asked"
        else:
            named, origin = _by_shape(keys, known, candidates), "the shapes, which fit in one way only"
    resolved = {key: aliases.get(name, name) for key, name in named.items()}
    _check(resolved, keys, known, shapes, origin)
    return Named(resolved, origin)


def read_names(text: str) -> Any:
    """Return what a JSON file says of the names, or ``order``.

    Raises:
        InputError: the file can't be read, or holds something else than a list of names for each group.
    """
    if text == "order":
        return "order"
    try:
        with open(text, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"can't read the names from {text!r}: {error}") from error
    return checked_names(found)


def checked_names(names: Any) -> Any:
    """Return names that were handed over, once they are ``order`` or a list of names for each group."""
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        # Of one group.
        return [list(names)]
    if names in (None, "order") or (
        isinstance(names, list | tuple)
        and all(isinstance(group, list | tuple) and all(isinstance(name, str) for name in group) for group in names)
    ):
        return names
    raise InputError("names is 'order', or a list with the names of each group's parameters, in the group's order")


def _said(
    found: Imported,
    groups: Sequence[Mapping[str, Any]],
    keys: Sequence[Sequence[Any]],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    names: Any,
) -> tuple[dict[Any, str] | None, str]:
    """Return the names that somebody says, and who does."""
    flat = [key for group in keys for key in group]
    if all(isinstance(key, str) for key in flat):
        return {key: key for key in flat}, "the source"
    if all("param_names" in group for group in groups):
        told, origin = [list(group["param_names"]) for group in groups], "param_names of the source's groups"
    elif names not in (None, "order"):
        told, origin = [list(group) for group in names], "the names that were handed over"
    elif optimizer is not None:
        if model is None:
            raise InputError("the optimizer alone has no names: hand over its model, too, as model=")
        own = names_of(model)
        foreign = [value for group in optimizer.param_groups for value in group["params"] if id(value) not in own]
        if foreign:
            raise InputError("the optimizer that was handed over has parameters that aren't the model's")
        told = [[own[id(value)] for value in group["params"]] for group in optimizer.param_groups]
        origin = "the optimizer that was handed over"
        if [len(group) for group in told] != [len(group) for group in keys]:
            # Some libraries keep no frozen parameters.
            trained = {name for name, value in model.named_parameters() if value.requires_grad}
            told = [[name for name in group if name in trained] for group in told]
    else:
        return None, ""
    if [len(group) for group in told] != [len(group) for group in keys]:
        raise CheckpointError(
            f"{origin} name {_sizes(told)} parameters in the groups of the optimizer, and its state in the source has "
            f"{_sizes(keys)}: hand over those of the run that wrote it"
        )
    return {
        key: name for own, group in zip(told, keys, strict=True) for name, key in zip(own, group, strict=True)
    }, origin


def _known_shapes(state: Mapping[Any, Any], masters: Mapping[Any, Any]) -> dict[Any, Shape]:
    """Return the shapes of those parameters whose state has tensors of the parameter's own shape."""
    found: dict[Any, Shape] = {}
    for key, entries in state.items():
        if not isinstance(entries, Mapping):
            continue
        shapes = {
            tuple(entries[name].shape) for name in ELEMENTWISE & entries.keys() if hasattr(entries[name], "shape")
        }
        if len(shapes) == 1:
            found[key] = shapes.pop()
    return {**found, **{key: tuple(value.shape) for key, value in masters.items()}}


def _candidates(found: Imported, shapes: Mapping[str, Shape], model: nn.Module | None) -> dict[str, Shape]:
    """Return the entries of the model that may be the optimizer's parameters."""
    if model is not None:
        return {name: shapes[name] for name, _ in model.named_parameters() if name in shapes}
    buffers = set(found.buffers or ())
    for name in shapes:
        # Of torch's batch norms.
        if name.rpartition(".")[2] == "num_batches_tracked":
            place = name.removesuffix("num_batches_tracked")
            buffers |= {f"{place}{kind}" for kind in ("num_batches_tracked", "running_mean", "running_var")}
    for name, value in found.weights.items():
        if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
            buffers.add(name)
    return {name: shape for name, shape in shapes.items() if name not in buffers}


def _by_shape(
    keys: Sequence[Sequence[Any]], known: Mapping[Any, Shape], candidates: Mapping[str, Shape]
) -> dict[Any, str]:
    """Return the one assignment that the shapes allow.

    Raises:
        CheckpointError: they allow none, or several.
    """
    flat = [key for group in keys for key in group]
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in candidates.items():
        by_shape.setdefault(shape, []).append(name)
    asked: dict[Shape, list[Any]] = {}
    for key in flat:
        if key in known:
            asked.setdefault(known[key], []).append(key)
    found: dict[Any, str] = {}
    for shape, wanting in asked.items():
        names = by_shape.get(shape, [])
        if len(names) < len(wanting):
            raise CheckpointError(
                f"the optimizer's state has {len(wanting)} parameters of shape {shape}, and the model {len(names)}: "
                f"the two don't belong together, or {HELP}"
            )
        if len(names) > 1:
            raise CheckpointError(
                f"the optimizer's state lists its parameters by number, and of shape {shape} the model has "
                f"{_some(names)}: {HELP}"
            )
        found[wanting[0]] = names[0]
    left = [key for key in flat if key not in known]
    free = [name for name in candidates if name not in set(found.values())]
    if left and not (len(left) == len(free) == 1):
        raise CheckpointError(
            f"the optimizer's state lists its parameters by number, and has nothing for {len(left)} of them that tells "
            f"their shape: they could be {_some(free)}; {HELP}"
        )
    return {**found, **dict(zip(left, free, strict=True))}


def _in_order(
    keys: Sequence[Sequence[Any]], known: Mapping[Any, Shape], candidates: Mapping[str, Shape]
) -> dict[Any, str]:
    """Return the one assignment in which each group has its parameters in the order of the model's own.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    entries = list(candidates.items())
    found = list(islice(_orders(keys, known, entries), 2))
    if not found:
        raise CheckpointError(
            f"no order of the model's {len(entries)} parameters fits the {_sizes(keys)} of the optimizer's groups and "
            f"their shapes: {HELP}"
        )
    if len(found) > 1:
        one, two = found
        key = next(key for key in one if one[key] != two[key])
        raise CheckpointError(
            f"in the order of the model's own parameters, number {key} of the optimizer could be {one[key]!r} or "
            f"{two[key]!r}: {HELP}"
        )
    return found[0]


def _orders(
    keys: Sequence[Sequence[Any]], known: Mapping[Any, Shape], entries: Sequence[tuple[str, Shape]]
) -> Iterator[dict[Any, str]]:
    """Yield up to two assignments that keep the order of the entries within each group."""
    # By how far each group and the entries are: the ways to go on from there that were found, at most two.
    ways: dict[tuple[int, ...], list[dict[Any, str]]] = {tuple(0 for _ in keys): [{}]}
    total = sum(len(group) for group in keys)
    for place, (name, shape) in enumerate(entries):
        following: dict[tuple[int, ...], list[dict[Any, str]]] = {}
        for done, assignments in ways.items():
            moves = [
                (number, group[done[number]])
                for number, group in enumerate(keys)
                if done[number] < len(group) and known.get(group[done[number]], shape) == shape
            ]
            if total - sum(done) <= len(entries) - place - 1:
                following.setdefault(done, []).extend(assignments)
            for number, key in moves:
                after = (*done[:number], done[number] + 1, *done[number + 1 :])
                following.setdefault(after, []).extend({**one, key: name} for one in assignments)
        ways = {done: assignments[:2] for done, assignments in following.items()}
        if len(ways) > _MOST_WAYS:
            raise CheckpointError(f"the order of the model's own parameters leaves too many ways: {HELP}")
    yield from ways.get(tuple(len(group) for group in keys), [])


def _check(
    named: Mapping[Any, str],
    keys: Sequence[Sequence[Any]],
    known: Mapping[Any, Shape],
    shapes: Mapping[str, Shape],
    origin: str,
) -> None:
    taken: dict[str, Any] = {}
    for key in (key for group in keys for key in group):
        name = named[key]
        if name not in shapes:
            raise CheckpointError(
                f"by {origin}, the optimizer has the parameter {name!r}, which the model in the source lacks; it has "
                f"{_some(list(shapes))}"
            )
        if name in taken:
            raise CheckpointError(f"by {origin}, the optimizer has the parameter {name!r} twice")
        taken[name] = key
        if key in known and known[key] != shapes[name]:
            raise CheckpointError(
                f"by {origin}, {name!r} {shapes[name]} has a state of shape {known[key]} in the optimizer: they don't "
                f"belong together; {HELP}"
            )


def _sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " + ".join(str(len(group)) for group in groups) or "0"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
