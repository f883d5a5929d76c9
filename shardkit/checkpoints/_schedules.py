"""Schedules keep a list of values with one for each parameter group: they follow the groups, not their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardkit.errors import CheckpointError

# As torch's schedules call them.
_BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"})
_OTHERS = frozenset({"_milestones", "_schedulers", "_schedule_phases"})


def regrouped(
    name: str, target: Any, state: Any, optimizer: Optimizer | None, sources: Sequence[int | None], count: int
) -> Any:
    """Return an object's saved state with its lists by group in the order of the groups here.

    ``sources`` gives for each group here the number that it had among the checkpoint's ``count``. Anything that isn't
    a schedule of this optimizer keeps its state as it is.

    Raises:
        CheckpointError: which of its values belong to which group can't be told.
    """
    if list(sources) == list(range(count)) or optimizer is None or getattr(target, "optimizer", None) is not optimizer:
        return state
    return _regrouped(name, isinstance(target, LRScheduler), state, sources, count)


def _regrouped(name: str, known: bool, state: Any, sources: Sequence[int | None], count: int) -> Any:
    if not isinstance(state, dict):
        return state
    found = dict(state)
    for key, value in state.items():
        if not isinstance(value, list | tuple) or (known and key in _OTHERS - {"_schedulers"}):
            continue
        if known and key == "_schedulers":
            found[key] = type(value)(_regrouped(name, known, part, sources, count) for part in value)
        elif len(value) != count:
            continue
        elif known and key in _BY_GROUP and None not in sources:
            found[key] = type(value)(value[number] for number in sources if number is not None)
        else:
            raise CheckpointError(
                f"the optimizer's groups are others than in the checkpoint, and object {name!r} keeps {key!r}, one "
                f"value for each of {count} groups by position: give the optimizer the groups that it had, in their "
                "order"
            )
    return found
