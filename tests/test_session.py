"""The order of calls, and what a session says when it is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import Session
from shardkit.errors import InputError, NonFiniteError, StateError
from shardkit.testing.cases._models import W, batch, mlp, sgd, step, train, train_alone


def opened(strategy: str = "ddp", model: nn.Module | None = None) -> Session:
    model = W(1) if model is None else model
    return shardkit.prepare(model, sgd(model), strategy)


def test_step_is_true_only_when_the_weights_moved() -> None:
    with opened("ddp:accumulate=2") as session:
        assert not step(session, session.model([1.0]))
        assert session.steps == 0
        assert step(session, session.model([1.0]))
        assert session.steps == 1


def test_step_before_backward_is_refused() -> None:
    with opened() as session, pytest.raises(StateError, match="step without backward"):
        session.step()


def test_backward_past_the_window_is_refused_and_the_window_is_kept() -> None:
    with opened("ddp:accumulate=2") as session:
        session.backward(session.model([1.0]))
        session.backward(session.model([3.0]))
        with pytest.raises(StateError, match="2 of 2 micro-batches are in"):
            session.backward(session.model([100.0]))
        assert session.step()
        assert torch.allclose(session.full_weights()["w"], torch.tensor([0.8]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3.0, "a tensor, not a float"),
        (torch.ones(2, requires_grad=True), r"a scalar, not of shape \(2,\)"),
        (torch.tensor(1.0), "has no gradient"),
        (torch.tensor(1j, requires_grad=True), "a real floating-point number"),
    ],
)
def test_a_loss_that_cannot_be_back_propagated_is_refused(loss: Any, message: str) -> None:
    with opened() as session:
        with pytest.raises(InputError, match=message):
            session.backward(loss)
        assert step(session, session.model([1.0]))


def test_the_loss_is_not_rescaled() -> None:
    with opened("ddp:accumulate=4") as session:
        loss = session.model([3.0])
        session.backward(loss)
        assert loss.item() == 3.0


def test_a_loss_of_one_element_passes_for_a_scalar() -> None:
    with opened() as session:
        assert step(session, session.model([1.0]).reshape(1))
        assert torch.allclose(session.full_weights()["w"], torch.tensor([0.9]))


def test_the_norm_is_there_when_it_was_asked_for_and_else_it_says_how() -> None:
    with opened() as session:
        step(session, session.model([2.0]))
        with pytest.raises(StateError, match="track_grad_norm=True"):
            session.grad_norm  # noqa: B018
    with opened("ddp:track_grad_norm=true") as session:
        with pytest.raises(StateError, match="before the first step"):
            session.grad_norm  # noqa: B018
        step(session, session.model([2.0]))
        assert session.grad_norm == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["step", "zero_grad", "state_dict"])
def test_what_is_the_sessions_is_refused_on_the_optimizer_while_it_is_open(name: str) -> None:
    model = W(1)
    optimizer = sgd(model)
    with (
        shardkit.prepare(model, optimizer, "ddp"),
        pytest.raises(StateError, match=f"optimizer.{name} is the session's"),
    ):
        getattr(optimizer, name)()
    getattr(optimizer, name)()


def test_the_users_own_objects_are_what_the_session_holds() -> None:
    model = mlp()
    optimizer = sgd(model)
    with shardkit.prepare(model, optimizer, "ddp") as session:
        assert session.model is model
        assert session.optimizer is optimizer


def test_a_backward_that_fails_leaves_no_window_to_step() -> None:
    with opened("ddp:accumulate=2") as session:
        loss = session.model([1.0])
        session.backward(loss)
        with pytest.raises(RuntimeError, match="second time"):
            session.backward(loss)
        with pytest.raises(StateError, match="backward failed with RuntimeError"):
            session.step()


def test_a_closed_session_says_so() -> None:
    session = opened()
    session.close()
    for call in (session.step, session.full_weights, lambda: session.backward(torch.ones(()))):
        with pytest.raises(StateError, match="closed"):
            call()


def test_a_non_finite_loss_names_itself_and_moves_nothing() -> None:
    with opened() as session:
        session.backward(session.model([1.0]) * float("nan"))
        with pytest.raises(NonFiniteError, match=r"step 1 under 'ddp' .*rank 0: nan"):
            session.step()
        assert torch.equal(session.full_weights()["w"], torch.tensor([1.0]))
        assert step(session, session.model([1.0]))
        assert (session.steps, session.skipped_steps) == (1, 1)


def test_without_sharding_a_run_has_the_bits_of_plain_torch() -> None:
    reference, model = mlp(), mlp()
    expected = train_alone(reference, torch.optim.AdamW(reference.parameters()), steps=5, parts=1, max_norm=0.1)
    with shardkit.prepare(model, torch.optim.AdamW(model.parameters()), "ddp:max_grad_norm=0.1") as session:
        found = train(session, steps=5)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_after_close_the_module_trains_on_its_own() -> None:
    model = mlp()
    optimizer = sgd(model)
    with shardkit.prepare(model, optimizer, "ddp") as session:
        train(session, steps=1)
    before = copy.deepcopy(model.state_dict())
    model(batch(1, 0)).square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_evaluation_restores_the_mode_of_every_part() -> None:
    model = nn.Sequential(nn.Dropout(), mlp())
    model[1].eval()
    with opened(model=model) as session:
        with session.evaluate() as module:
            assert module is model
            assert not any(part.training for part in module.modules())
            assert not module(batch(0, 0)).requires_grad
        assert model[0].training
        assert not model[1].training


def test_a_session_left_by_an_error_lets_go_of_the_process_group() -> None:
    with pytest.raises(ZeroDivisionError), opened() as session:
        _ = session.steps / 0
    assert not torch.distributed.is_initialized()


def test_a_session_describes_itself() -> None:
    with opened("ddp:accumulate=2") as session:
        assert repr(session) == "<shardkit.Session of W on ddp:accumulate=2, 0 steps>"
