"""What the user does to gradients and losses, between the forward and the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit.errors import InputError, NonFiniteError, StateError
from shardkit.testing.cases._models import (
    Prepare,
    W,
    assert_close,
    assert_same_as_alone,
    batch,
    mean_square,
    mlp,
    sgd,
    step,
)
from shardkit.testing.cases._table import case

# What the user does to gradients.


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@case()
def an_autograd_function_of_the_users_own_counts(prepare: Prepare, rank: int) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(sizes=(8, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.body(x))  # type: ignore[no-any-return, no-untyped-call]

    assert_same_as_alone(prepare, Custom, mean_square)


@case()
def gradients_scaled_by_a_hook_on_the_parameter_count(prepare: Prepare, rank: int) -> None:
    for before in (True, False):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        if before:
            model.weight.register_hook(lambda gradient: gradient * 0.5)
        with prepare(model, sgd(model), accumulate=2) as session:
            if not before:
                session.model.weight.register_hook(lambda gradient: gradient * 0.5)
            for micro in range(2):
                step(session, session.model(torch.full((1, 4), rank + 1.0 + micro)).sum())
            # The mean of 1, 2 and 2, 3, halved.
            assert_close(session.full_weights()["weight"], torch.full((1, 4), 0.9))


@case()
def gradients_scaled_once_they_are_accumulated_count(prepare: Prepare, rank: int) -> None:
    def halve(value: Tensor) -> None:
        assert value.grad is not None
        value.grad.mul_(0.5)

    for before in (True, False):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        if before:
            model.weight.register_post_accumulate_grad_hook(halve)
        with prepare(model, sgd(model)) as session:
            if not before:
                session.model.weight.register_post_accumulate_grad_hook(halve)
            step(session, session.model(torch.full((1, 4), rank + 1.0)).sum())
            assert_close(session.full_weights()["weight"], torch.full((1, 4), 0.925))


@case()
def gradients_scaled_by_hooks_of_modules_count(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        return model(batch(index, part)).square().mean()

    def build() -> nn.Module:
        model = mlp(sizes=(8, 8, 8))
        model[0].register_forward_hook(lambda part, given, out: out * 2)
        model[2].register_forward_pre_hook(lambda part, given: (given[0] + 1,))
        model[2].register_full_backward_hook(lambda part, by_input, by_output: (by_input[0] * 3,))
        return model

    assert_same_as_alone(prepare, build, loss)


@case()
def outputs_changed_in_place_are_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        out = model(batch(index, part))
        out.mul_(2).add_(1)
        out[:, 0] = 0
        return out.square().mean()

    assert_same_as_alone(prepare, lambda: mlp(sizes=(8, 8)), loss)


@case()
def gradients_that_are_expanded_or_transposed_are_right(prepare: Prepare, rank: int) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))
            self.c = nn.Parameter(torch.randn(3, 1, 5).transpose(0, 2).detach())

        def forward(self, x: Tensor) -> Tensor:
            # The gradient of ``a`` is a number that is expanded, that of ``b`` a transposed product.
            return self.a.sum() * x.mean() + (self.b.t() @ x[:, :4].t()).square().mean() + self.c.sum() * x.sum()

    assert_same_as_alone(prepare, Strided, lambda m, i, p: m(batch(i, p)), 2e-5)


# Losses.


@case(raw=False)
def a_loss_that_is_nan_on_one_rank_moves_nothing_anywhere(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model), accumulate=2) as session:
        before = session.full_weights()
        for micro in range(2):
            bad = float("nan") if rank == 1 and micro == 0 else 1.0
            session.backward(session.model(batch(0, 2 * micro + rank)).square().mean() * bad)
            if micro == 0:
                assert not session.step()
        with pytest.raises(NonFiniteError, match="rank 1: nan"):
            session.step()
        after = session.full_weights()
        assert all(torch.equal(before[name], after[name]) for name in before)


@case()
def a_loss_of_one_element_is_a_scalar(prepare: Prepare, rank: int) -> None:
    for shape in ((1,), (1, 1)):
        model = W(1)
        with prepare(model, sgd(model)) as session:
            step(session, session.model([rank + 1]).reshape(shape))
            assert_close(session.full_weights()["w"], [0.85])


@case(raw=False)
def a_loss_that_is_none_is_refused_and_the_next_counts(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        out = session.model([rank + 1])
        for wrong in (1.5, 3, None, out.item(), torch.tensor(3), out.detach(), torch.stack([out, out])):
            with pytest.raises(InputError, match="the loss"):
                session.backward(wrong)  # type: ignore[arg-type]
        step(session, out)
        assert_close(session.full_weights()["w"], [0.85])


# Gradients between backward and step.


def shows_gradients(model: nn.Module) -> bool:
    try:
        return all(value.grad is not None for value in model.parameters())
    except StateError:
        return False


@case(raw=False)
def c68_clipping_by_the_user_counts_or_is_refused(prepare: Prepare, rank: int) -> None:
    def clip_norm(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def clip_value(model: nn.Module) -> None:
        for value in model.parameters():
            if value.grad is not None:
                value.grad.clamp_(-0.01, 0.01)

    def replace(model: nn.Module) -> None:
        for value in model.parameters():
            value.grad = torch.ones_like(value)

    for change in (clip_norm, clip_value, replace):
        reference, model = mlp(), mlp()
        optimizer = sgd(reference)
        with prepare(model, sgd(model), accumulate=2) as session:
            for index in range(2):
                for micro in range(2):
                    session.backward(session.model(batch(index, 2 * micro + rank)).square().mean())
                    shown = micro == 0 or shows_gradients(model)
                    if micro == 1 and shown:
                        change(session.model)
                    elif micro == 1:
                        with pytest.raises(StateError, match=r"full_gradients.*max_grad_norm"):
                            change(session.model)
                        assert list(session.full_gradients()) == [name for name, _ in model.named_parameters()]
                        with pytest.raises(StateError, match="full_gradients"):
                            change(session.model)
                    session.step()
                optimizer.zero_grad()
                reference(torch.cat([batch(index, part) for part in range(4)])).square().mean().backward()
                if shown:
                    change(reference)
                optimizer.step()
            assert_close(session.full_weights(), dict(reference.state_dict()))
        assert {type(value) for value in model.parameters()} == {nn.Parameter}
        assert all(value.grad is None for value in model.parameters())


@case()
def c68_what_is_copied_between_backward_and_step_can_be_trained(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        session.backward(session.model(batch(0, rank)).square().mean())
        if "parameters" not in prepare.shards:
            copied = copy.deepcopy(model[0].bias)
            copied.sum().backward()
            assert copied.grad is not None
        assert session.step()


@case()
def c68_a_session_left_between_backward_and_step_shows_gradients_again(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        session.save(prepare.folder)
        session.backward(session.model(batch(0, rank)).square().mean())
        session.load(prepare.folder)
        assert [value.grad for value in model.parameters()] == [None] * 4
        session.backward(session.model(batch(0, rank)).square().mean())
    assert [value.grad for value in model.parameters()] == [None] * 4
    model(batch(0, 0)).sum().backward()
    assert all(value.grad is not None for value in model.parameters())
