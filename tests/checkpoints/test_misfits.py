"""A checkpoint that doesn't fit is refused with names and shapes, alike on every rank, and leaves all as it was."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import shardkit
from shardkit.errors import CheckpointError, MismatchError
from shardkit.testing import _ahead, run
from tests.checkpoints._runs import Odd, batch, clear

Groups = list[dict[str, Any]]


def groups_of(model: nn.Module) -> Groups:
    """Return two groups of all parameters but ``outside``."""
    held = [value for name, value in model.named_parameters() if name != "outside"]
    return [{"params": held[0::2], "lr": 0.02}, {"params": held[1::2], "lr": 0.01}]


class Counting:
    """An object with a state, which may refuse one."""

    def __init__(self, count: int = 0, refuses: bool = False) -> None:
        self.count = count
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.refuses and self.count > 1000:
            raise ValueError("no such count")


def without(name: str) -> Callable[[Odd], None]:
    return lambda model: delattr(model, name)


def having(name: str, value: Callable[[], Tensor]) -> Callable[[Odd], None]:
    def change(model: Odd) -> None:
        if name in model._buffers:
            model._buffers[name] = value()
        else:
            setattr(model, name, nn.Parameter(value()))

    return change


def with_buffer(model: Odd) -> None:
    model.register_buffer("late", torch.ones(2, 2))


def untied(model: Odd) -> None:
    model.third.weight = nn.Parameter(model.third.weight.detach().clone())


def tied_more(model: Odd) -> None:
    model.second.bias = model.third.bias


def regroup(groups: Groups) -> Groups:
    return [
        {**groups[0], "params": groups[0]["params"][1:]},
        {**groups[1], "params": [groups[0]["params"][0], *groups[1]["params"]]},
    ]


def leave_out(groups: Groups) -> Groups:
    return [{**groups[0], "params": groups[0]["params"][1:]}, groups[1]]


def adamw(groups: Groups) -> Optimizer:
    return AdamW(groups, weight_decay=0.1)


def same(value: Any) -> Any:
    return value


# What differs in the run that wrote the checkpoint, and what the error says of it.
MISFITS: dict[str, tuple[Callable[[Odd], Any], Callable[[Groups], Groups], Callable[[Groups], Any], str]] = {
    "a parameter is missing": (
        without("unused"),
        same,
        adamw,
        r"doesn't fit the model: this session has 'unused' \(4, 3\) that the checkpoint lacks",
    ),
    "a parameter is too many": (
        having("more", lambda: torch.ones(2, 5)),
        same,
        adamw,
        r"the checkpoint has 'more' \(2, 5\) that this session lacks",
    ),
    "a parameter has another shape": (
        having("unused", lambda: torch.ones(3, 4)),
        same,
        adamw,
        r"other shapes: 'unused' \(3, 4\) in the checkpoint and \(4, 3\) here",
    ),
    "a parameter of one element has a dimension more": (
        having("shift", lambda: torch.ones(())),
        same,
        adamw,
        r"other shapes: 'shift' \(\) in the checkpoint and \(1,\) here",
    ),
    "a parameter has more digits": (
        lambda model: model.double(),
        same,
        adamw,
        r"is of torch.float64 in the checkpoint and of torch.float32 here, which would lose digits",
    ),
    "a buffer is missing": (
        without("offset"),
        same,
        adamw,
        r"this session has 'offset' \(3,\) that the checkpoint lacks",
    ),
    "a buffer is too many": (with_buffer, same, adamw, r"the checkpoint has 'late' \(2, 2\) that this session lacks"),
    "a buffer has another shape": (
        having("offset", lambda: torch.ones(3, 1)),
        same,
        adamw,
        r"other shapes: 'offset' \(3, 1\) in the checkpoint and \(3,\) here",
    ),
    "a buffer has more digits": (
        having("offset", lambda: torch.ones(3, dtype=torch.float64)),
        same,
        adamw,
        r"'offset' is of torch.float64 in the checkpoint and of torch.float32 here, which would lose digits",
    ),
    "a buffer was of another kind": (
        having("count", lambda: torch.tensor(0.5)),
        same,
        adamw,
        r"'count' is of torch.float32 in the checkpoint and of torch.int64 here",
    ),
    "what is tied here wasn't": (untied, same, adamw, "second.weight, third.weight are one tensor here, and in the"),
    "what was tied isn't here": (tied_more, same, adamw, "second.bias, third.bias are one tensor in the checkpoint"),
    "another optimizer": (
        same,
        same,
        lambda groups: SGD(groups, momentum=0.9),
        "of the optimizer SGD, and this session's is AdamW",
    ),
    "no optimizer": (same, same, lambda groups: None, "the checkpoint has no optimizer"),
    "other groups": (same, regroup, adamw, "were in groups of their own when the checkpoint was written, with lr"),
    "a parameter without optimizer": (
        same,
        leave_out,
        adamw,
        r"doesn't fit the optimizer: this session has 'scale' \(\) that the checkpoint lacks",
    ),
}
# What differs in what is handed to load.
OBJECTS: dict[str, tuple[Callable[[dict[str, Any], int], dict[str, Any]], str]] = {
    "an object isn't handed over": (
        lambda objects, rank: {"schedule": objects["schedule"]},
        "the checkpoint has the state of 'counting': hand the object to load",
    ),
    "an object isn't in it": (
        lambda objects, rank: {**objects, "more": Counting()},
        "the checkpoint has no object 'more'; it has 'counting', 'schedule'",
    ),
    "an object refuses its state": (
        lambda objects, rank: {**objects, "counting": _refusing(objects, True)},
        "object 'counting' didn't take its state from the checkpoint: ValueError: no such count",
    ),
    "an object refuses its state on one rank": (
        lambda objects, rank: {**objects, "counting": _refusing(objects, rank == 1)},
        "rank 1: object 'counting' didn't take its state from the checkpoint: ValueError: no such count",
    ),
    "an object is handed over on one rank only": (
        lambda objects, rank: objects if rank else {},
        r"bring different things \(load, objects\): rank 0: \[\]; rank 1: \['counting', 'schedule'\]",
    ),
}
NAMES = [*MISFITS, *OBJECTS]


def _refusing(objects: dict[str, Any], refuses: bool) -> Counting:
    objects["counting"].refuses = refuses
    return objects["counting"]


def prepared(
    strategy: str,
    change: Callable[[Odd], Any] = same,
    regrouped: Callable[[Groups], Groups] = same,
    stepper: Callable[[Groups], Any] = adamw,
) -> shardkit.Session:
    model = Odd(noisy=True)
    change(model)
    return shardkit.prepare(model, stepper(regrouped(groups_of(model))), strategy)


def save_misfits(folder: Path) -> None:
    """Write a checkpoint for each misfit, and one that fits."""
    for name, (change, regrouped, stepper, _) in {"fits": (same, same, adamw, ""), **MISFITS}.items():
        with prepared("ddp", change, regrouped, stepper) as session:
            objects: dict[str, Any] = {"counting": Counting(2000)}
            if name != "no optimizer":
                session.optimizer.param_groups[0]["lr"] = 0.5
                if name == "fits":
                    rows, _ = batch(0)
                    session.backward(session.model(rows).square().mean())
                    session.step()
                objects["schedule"] = StepLR(session.optimizer, 3)
            session.save(folder / name, objects=objects)


def half_step(session: shardkit.Session, number: int) -> bool:
    rows, wanted = (part[session.rank :: session.world_size] for part in batch(number))
    session.backward(mse_loss(session.model(rows), wanted))
    return session.step()


def tried(strategies: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return, by strategy and misfit, what load said; the session stands in the midst of a window meanwhile."""
    save_misfits(folder)
    told: dict[str, dict[str, str]] = {}
    for strategy in strategies:
        clear()
        weights = []
        for tries in (True, False):
            random.seed(3)
            np.random.seed(3)
            torch.manual_seed(3)
            with prepared(f"{strategy},accumulate=2" if ":" in strategy else f"{strategy}:accumulate=2") as session:
                schedule = StepLR(session.optimizer, 3)
                objects: dict[str, Any] = {"counting": Counting(5), "schedule": schedule}
                for number in range(3):
                    half_step(session, number)
                schedule.step()
                if tries:
                    told[strategy] = {name: _refusal(session, objects, name, folder) for name in NAMES}
                for number in range(3, 6):
                    half_step(session, number)
                weights.append(session.full_weights())
        after = [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]
        told[strategy]["afterwards"] = f"other weights than if nobody had tried: {after}"
    return told


def _refusal(session: shardkit.Session, objects: dict[str, Any], name: str, folder: Path) -> str:
    """Return what a load says, and what it has changed all the same."""
    before = everything(session, objects)
    given = OBJECTS[name][0](objects, session.rank) if name in OBJECTS else objects
    told = "no refusal"
    try:
        session.load(folder / (name if name in MISFITS else "fits"), objects=given)
    except (CheckpointError, MismatchError) as error:
        told = str(error)
    objects["counting"].refuses = False
    after = everything(session, objects)
    changed = sorted(before.keys() ^ after.keys())
    for key in before.keys() & after.keys():
        one, other = before[key], after[key]
        if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
            changed.append(key)
    return f"{told}; changed: {', '.join(sorted(changed)) or 'nothing'}"


def everything(session: shardkit.Session, objects: dict[str, Any]) -> dict[str, Any]:
    """Return copies of all that a load could change on this rank."""
    engine = session._engine
    found: dict[str, Any] = {
        f"{shard.name} {shard.start}": shard.values.detach().clone() for shard in engine.weight_shards()
    }
    found |= {name: value.clone() for name, value in engine.model.named_buffers()}
    assert engine.stepper is not None
    for shard in engine.state_shards():
        for key, value in engine.stepper.state.get(shard.values, {}).items():
            found[f"{shard.name} {shard.start} {key}"] = value.clone() if isinstance(value, Tensor) else value
    for number, group in enumerate(session.optimizer.param_groups):
        found[f"group {number}"] = repr({key: value for key, value in group.items() if key != "params"})
    found["python"], found["torch"] = random.getstate(), torch.get_rng_state()
    found["numpy"] = repr(np.random.get_state())
    found["counters"] = (session.steps, session.skipped_steps, session.step_was_skipped)
    found["objects"] = repr({name: held.state_dict() for name, held in objects.items()})
    return found


@cache
def refusals(strategies: tuple[str, ...], folder: Path) -> list[dict[str, dict[str, str]]]:
    return run(tried, list(strategies), folder, timeout=300)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused_and_leaves_all_as_it_was(
    name: str, strategy: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = tuple(one for (one,) in _ahead.selected(request.session, request.function, "strategy"))
    ranks = refusals(wanted, tmp_path_factory.getbasetemp() / "misfits")
    message = MISFITS[name][3] if name in MISFITS else OBJECTS[name][1]
    assert ranks[0][strategy][name] == ranks[1][strategy][name]
    assert re.search(message, ranks[0][strategy][name]), ranks[0][strategy][name]
    assert ranks[0][strategy][name].endswith("; changed: nothing")
    assert ranks[0][strategy]["afterwards"].endswith(": []")
