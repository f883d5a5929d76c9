"""The public cases of what surrounds a step: checkpoints, evaluation, copies, failures, a user's own optimizer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit.errors import MismatchError, NonFiniteError, ShardkitError, StateError, UnsupportedError
from shardkit.testing.cases._models import (
    Prepare,
    W,
    assert_close,
    batch,
    mlp,
    sgd,
    step,
    train,
    train_alone,
)
from shardkit.testing.cases._table import case


@case()
def c53_a_resumed_run_has_the_same_bits(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), max_grad_norm=0.5) as session:
        train(session, steps=2)
        session.save(prepare.folder)
        first = train(session, steps=2, first=2)
    other = mlp(seed=7)
    with prepare(other, torch.optim.AdamW(other.parameters(), lr=0.3), max_grad_norm=0.5) as session:
        session.load(prepare.folder)
        assert session.steps == 2
        assert session.optimizer.param_groups[0]["lr"] == 0.1
        second = train(session, steps=2, first=2)
    assert all(torch.equal(first[name], second[name]) for name in first)


@case()
def c56_interleaved_groups_train_as_in_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 16, 16, 8))
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 3e-3}]
        return model, torch.optim.Adam(groups)

    expected = train_alone(*build(), steps=3, parts=2)
    with prepare(*build()) as session:
        assert_close(train(session, steps=3), expected, 2e-6)


@case()
def c62_keys_are_those_of_the_bare_module(prepare: Prepare, rank: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x).square().mean()

    keys = list(Named().state_dict())
    for compiled in (False, True):
        bare = Named()
        model = torch.compile(bare, backend="eager") if compiled else bare
        with prepare(model, sgd(model)) as session, warnings.catch_warnings():
            if compiled:
                # The compiler remarks on the hooks of a library, and on gradients that it looks at itself.
                warnings.simplefilter("ignore")
            step(session, session.model(batch(0, rank)))
            weights = session.full_weights()
            assert list(weights) == keys
            Named().load_state_dict(weights, strict=True)


@case(raw=False)
def c64_saving_in_mid_window_is_refused(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=4) as session:
        step(session, session.model([1.0]))
        step(session, session.model([1.0]))
        with pytest.raises(StateError, match="mid-window"):
            session.save(prepare.folder)
        step(session, session.model([1.0]))
        assert step(session, session.model([1.0]))
        assert_close(session.full_weights()["w"], [0.9])


@case()
def c66_ranks_may_generate_different_lengths(prepare: Prepare, rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)

    def generate(module: nn.Module, length: int) -> list[Tensor]:
        state, states = torch.ones(4), []
        for _ in range(length):
            state = module(state)
            states.append(state)
        return states

    with prepare(model, sgd(model)) as session:
        length = (2, 5)[rank]
        with session.evaluate() as module:
            found = generate(module, length)
        with torch.no_grad():
            expected = generate(plain, length)
        assert len(found) == length
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert step(session, session.model(torch.ones(4)).sum())


@case()
def c68_averaged_gradients_are_visible_between_backward_and_step(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    with prepare(model, sgd(model)) as session:
        session.backward(session.model(torch.full((2,), rank + 1.0)).sum())
        assert_close(session.full_gradients()["weight"], [[1.5, 1.5]])
        session.step()


@case(raw=False)
def c68_gradients_are_refused_once_the_step_is_done(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    with prepare(model, sgd(model)) as session:
        step(session, session.model(torch.full((2,), rank + 1.0)).sum())
        with pytest.raises(StateError, match="0 of 1 micro-batches"):
            session.full_gradients()


@case()
def c69_a_parameter_without_dimensions_keeps_its_shape(prepare: Prepare, rank: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s, self.w = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))

        def forward(self, x: float) -> Tensor:
            return self.s * self.w.sum() * x

    model = Scaled()
    with prepare(model, sgd(model)) as session:
        step(session, session.model(rank + 1))
        session.save(prepare.folder)
        session.load(prepare.folder)
        weights = session.full_weights()
        assert_close(weights["s"], torch.tensor(1.55))
        assert weights["s"].shape == ()
        assert_close(weights["w"], torch.full((3,), 0.7))


class SignSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.grad.sign())


class Lars(torch.optim.SGD):
    """Scales each parameter's step by the ratio of its own norm to its gradient's: it needs whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.norm() / value.grad.norm() * value.grad)


@case()
def c72_an_element_wise_optimizer_of_the_users_own_is_right(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, SignSGD(model.parameters(), lr=0.1)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.9])


@case(or_refused=True)
def c72_a_layer_wise_optimizer_sees_whole_tensors(prepare: Prepare, rank: int) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([3.0, 4.0])), "v": nn.Parameter(torch.tensor([6.0, 8.0]))})
    with prepare(model, Lars(model.parameters(), lr=0.1)) as session:
        step(session, session.model["w"].sum() + session.model["v"].sum())
        weights, ratio = session.full_weights(), 5 / 2**0.5
        assert_close(weights["w"], torch.tensor([3.0, 4.0]) - 0.1 * ratio)
        assert_close(weights["v"], torch.tensor([6.0, 8.0]) - 0.2 * ratio)


@case()
def c75_foreach_and_fused_give_the_same_step(prepare: Prepare, rank: int) -> None:
    for flags in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model = W(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **flags)
        with prepare(model, optimizer) as session:
            step(session, session.model([1.0]))
            assert_close(session.full_weights()["w"], [0.89])
            session.save(prepare.folder)
            step(session, session.model([1.0]))
            first = session.full_weights()["w"]
            session.load(prepare.folder)
            step(session, session.model([1.0]))
            assert torch.equal(session.full_weights()["w"], first)


@case()
def c75_an_optimizer_that_fails_in_its_step_fails_on_every_rank(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with pytest.raises((ShardkitError, RuntimeError, AssertionError)):  # noqa: SIM117
        with prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)) as session:
            step(session, session.model([1.0]))


@case(raw=False)
def c76_what_is_prepared_is_not_prepared_again(prepare: Prepare, rank: int) -> None:
    model = W(1)
    optimizer = sgd(model)
    with prepare(model, optimizer) as session:
        for again in (model, session.model, nn.Sequential(model)):
            with pytest.raises(StateError, match="prepared already"):
                prepare(again, sgd(again))
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.85])
    with prepare(model, optimizer) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])


@case()
def c78_two_models_train_side_by_side(prepare: Prepare, rank: int) -> None:
    generator, critic = W(1), W(2)
    with prepare(generator, sgd(generator)) as first, prepare(critic, sgd(critic)) as second:
        step(first, first.model([rank + 1]))
        assert_close(second.full_weights()["w"], [2.0])
        step(second, second.model([rank + 1]))
        assert_close(first.full_weights()["w"], [0.85])
        assert_close(second.full_weights()["w"], [1.85])


@case()
def c79_state_can_be_copied_and_saved(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, steps=1)
        weights = session.full_weights()
        prepare.folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, prepare.folder / f"weights-{rank}.pt")
        clone = mlp(seed=1)
        clone.load_state_dict(torch.load(prepare.folder / f"weights-{rank}.pt", weights_only=True))
        expected = session.full_weights()
    copied = copy.deepcopy(model)
    assert_close(dict(copied.state_dict()), expected)


@case()
def c85_replicas_start_from_the_weights_and_buffers_of_rank_0(prepare: Prepare, rank: int) -> None:
    model = nn.Sequential(W(1 + rank), nn.BatchNorm1d(1))
    model[1].running_mean.fill_(rank)
    optimizer = sgd(model)
    with prepare(model, optimizer) as session:
        weights = session.full_weights()
        assert_close(weights["0.w"], [1.0])
        assert_close(weights["1.running_mean"], [0.0])


@case()
def grouped_and_frozen_parameters_train_as_in_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 16, 16, 8))
        model[0].weight.requires_grad_(False)
        decayed = [value for value in model.parameters() if value.dim() > 1]
        plain = [value for value in model.parameters() if value.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    expected = train_alone(*build(), steps=4, parts=2, max_norm=0.05)
    with prepare(*build(), max_grad_norm=0.05) as session:
        assert_close(train(session, steps=4), expected, 2e-6)


@case(raw=False)
def a_gradient_that_is_not_finite_is_refused_on_every_rank(prepare: Prepare, rank: int) -> None:
    for fields in ({}, {"max_grad_norm": 1.0}):
        model = mlp()
        with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **fields) as session:
            before = train(session, steps=1)
            # An infinite gradient on one rank only, under a finite loss.
            parameter = session.model(batch(0, 0)).square().sum()
            loss = torch.where(parameter < 0, parameter, (parameter * 0).sqrt() if rank == 1 else parameter)
            session.backward(loss)
            with pytest.raises(NonFiniteError, match="gradient is not"):
                session.step()
            after = session.full_weights()
            assert all(torch.equal(before[name], after[name]) for name in before)
            train(session, steps=1, first=1)
            assert session.steps == 2
            assert session.skipped_steps == 1


@case(raw=False)
def a_loss_that_is_not_finite_is_skipped_on_every_rank_when_asked(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), on_nonfinite="skip") as session:
        before = train(session, steps=1)
        session.backward(session.model(batch(0, 0)).square().mean() + (float("inf") if rank == 0 else 0.0))
        with pytest.warns(RuntimeWarning, match="rank 0: inf"):
            assert not session.step()
        after = session.full_weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(session, steps=1, first=1)


@case(or_refused=True)
def a_loss_on_one_rank_that_depends_on_no_parameter_counts_as_zero(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    with prepare(model, sgd(model)) as session:
        for index, expected in enumerate((0.95, 0.75, 0.45)):
            x = torch.full((1, 3), index + 1.0)
            nothing = torch.zeros((), requires_grad=True) * 1.0
            step(session, nothing if rank == 1 and index == 0 else session.model(x).sum())
            assert_close(session.full_weights()["weight"], torch.full((1, 3), expected))


@case()
def gradients_from_before_prepare_do_not_count(prepare: Prepare, rank: int) -> None:
    model = W(1)
    model([100.0]).backward()
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.85])


@case(raw=False)
def settings_that_part_among_ranks_in_mid_run_are_refused_before_anything_moves(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        session.optimizer.param_groups[0]["lr"] = 0.1 / (rank + 1)
        session.backward(session.model([1.0]))
        with pytest.raises(MismatchError, match=r"group 0 of the optimizer, lr\): rank 0: 0.1; rank 1: 0.05"):
            session.step()
        session.optimizer.param_groups[0]["lr"] = 0.1
        assert session.step()
        assert_close(session.full_weights()["w"], [0.9])


@case()
def a_session_left_by_an_error_on_every_rank_gives_the_module_back(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with pytest.raises(ZeroDivisionError), prepare(model, sgd(model)) as session:  # noqa: PT012
        step(session, session.model([rank + 1]))
        raise ZeroDivisionError
    assert_close(model.state_dict()["w"], [0.85])
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])


@case()
def weights_are_whole_within_evaluation_and_never_empty_without_a_word(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        expected = session.full_weights()
        with session.evaluate() as module:
            assert_close(session.full_weights(), expected)
            assert_close(dict(module.state_dict()), expected)
        try:
            assert_close(dict(model.state_dict()), expected)
            assert_close(dict(model[0].state_dict()), {"weight": expected["0.weight"], "bias": expected["0.bias"]})
        except UnsupportedError as error:
            assert "full_weights" in str(error)  # noqa: PT017
