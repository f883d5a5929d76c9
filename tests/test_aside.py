"""Sessions that nobody closed."""

from __future__ import annotations

import gc
import weakref

import torch

import shardkit
from shardkit import _aside
from shardkit.testing import run


def forgotten() -> tuple[list[bool], int, list[float]]:
    held = []
    for _ in range(3):
        model = torch.nn.Linear(4, 1)
        session = shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "ddp")
        session.backward(session.model(torch.ones(1, 4)).sum())
        held.append(weakref.ref(model.weight))
        del session, model
        gc.collect()
    model = torch.nn.Linear(4, 1)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "ddp") as session:
        session.backward(session.model(torch.ones(1, 4)).sum())
        moved = session.step()
    return [reference() is None for reference in held], len(_aside.open_asides), [float(moved)]


def test_a_session_that_was_never_closed_holds_no_parameters_once_it_is_forgotten() -> None:
    for gone, left, moved in run(forgotten):
        assert gone == [True, True, True]
        assert left == 0
        assert moved == [1.0]


def under_a_group_of_the_users() -> int:
    import torch.distributed as dist

    from shardkit import _processes

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "ddp").close()
    return _processes._linger_at_exit.cache_info().currsize


def test_a_rank_lingers_at_exit_whoever_made_its_process_group() -> None:
    # Otherwise gloo's thread may abort the process while the interpreter ends.
    assert run(under_a_group_of_the_users) == [1, 1]
