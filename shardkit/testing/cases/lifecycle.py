"""Life cycle: sessions side by side and one after another, calls that don't come on all ranks, copies, random state."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Session, _processes
from shardkit.errors import InputError, ShardkitError, StateError, StrategyError, UnsupportedError
from shardkit.testing.cases._models import (
    Prepare,
    W,
    assert_close,
    batch,
    installed,
    mlp,
    sgd,
    step,
    train,
    train_alone,
)
from shardkit.testing.cases._table import case

# One after another.


@case(raw=False)
def every_strategy_goes_on_with_the_weights_of_the_one_before(prepare: Prepare, rank: int) -> None:
    strategies = [variant.strategy for backend in installed().values() for variant in backend.variants_on("cpu")]
    first = strategies.index(prepare.text)
    reference, model = mlp(), mlp()
    expected = train_alone(reference, sgd(reference), steps=len(strategies) + 1, parts=2)
    for index, text in enumerate([*strategies[first:], *strategies[:first], prepare.text]):
        with Prepare(text, prepare.folder)(model, sgd(model)) as session:
            weights = train(session, steps=1, first=index)
    assert_close(weights, expected)
    assert_close(dict(model.state_dict()), expected)
    assert {type(value) for value in model.parameters()} == {nn.Parameter}
    assert vars(model).keys() == vars(mlp()).keys()


def hooks(model: nn.Module) -> list[tuple[str, str, int]]:
    """Return where hooks are on a module, its parts and its parameters, and how many."""
    found = [
        (name, kind, len(held))
        for name, part in model.named_modules()
        for kind, held in vars(part).items()
        if "hook" in kind and held
    ]
    for name, value in model.named_parameters():
        found += [(name, kind, len(getattr(value, kind))) for kind in _OF_TENSORS if getattr(value, kind, None)]
    return found


_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@case(raw=False)
def a_closed_session_leaves_no_hook_behind(prepare: Prepare, rank: int) -> None:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: None)
    model[0].weight.register_hook(lambda gradient: None)
    before = hooks(model)
    with prepare(model, sgd(model), accumulate=2) as session:
        train(session, steps=2)
        with session.evaluate() as whole:
            whole(batch(0, 0))
    assert hooks(model) == before
    assert {name for name in vars(model) if name not in vars(mlp())} == set()


@case(raw=False)
def after_a_refusal_the_same_model_and_optimizer_can_be_prepared(prepare: Prepare, rank: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    for wrong, kind in (("nowhere", ShardkitError), (f"{prepare.text.partition(':')[0]}:no_such=1", StrategyError)):
        with pytest.raises(kind):
            shardkit.prepare(model, optimizer, wrong)
    with pytest.raises(InputError, match="not the model's"):
        prepare(model, sgd(mlp(1)))
    reference = mlp()
    with prepare(model, optimizer) as session:
        assert_close(train(session, steps=2), train_alone(reference, sgd(reference), steps=2, parts=2))


@case(raw=False)
def after_a_backward_that_failed_a_checkpoint_brings_the_session_back(prepare: Prepare, rank: int) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("in the middle of a backward")

    reference, model = mlp(), mlp()
    expected = train_alone(reference, sgd(reference), steps=3, parts=4)
    with prepare(model, sgd(model), accumulate=2) as session:
        train(session, steps=1)
        session.save(prepare.folder)
        for good in (0, 1):
            for part in range(good):
                session.backward(session.model(batch(5, part)).square().mean())
            loss = session.model[2](Failing.apply(session.model[1](session.model[0](batch(5, rank)))))
            with pytest.raises(ZeroDivisionError):
                session.backward(loss.square().mean())
            with pytest.raises(StateError, match="backward failed with ZeroDivisionError"):
                session.backward(loss.square().mean())
            session.load(prepare.folder)
        assert_close(train(session, steps=2, first=1), expected)


@case(raw=False)
def a_session_that_is_closed_says_so(prepare: Prepare, rank: int) -> None:
    model = W(1)
    session = prepare(model, sgd(model))
    step(session, session.model([rank + 1]))
    session.close()
    session.close()
    for use in (session.step, session.full_weights, session.full_gradients, lambda: session.save(prepare.folder)):
        with pytest.raises(StateError, match="closed"):
            use()
    with pytest.raises(StateError, match="closed"):
        session.backward(model([1.0]))
    # The module is plain torch's again.
    optimizer = sgd(model)
    model([2.0]).backward()
    optimizer.step()
    assert_close(model.w.detach(), [0.65])


# Side by side.


@case(raw=False)
def c78_one_model_with_two_optimizers_is_refused(prepare: Prepare, rank: int) -> None:
    model = mlp()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    with prepare(model, first) as session:
        with pytest.raises(StateError, match=r"prepared already.*one optimizer with a group for each"):
            prepare(model, second)
        step(session, session.model(batch(0, rank)).square().mean())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # One after the other they may take their turns.
    with prepare(model, second) as session:
        step(session, session.model(batch(0, rank)).square().mean())
        weights = session.full_weights()
        assert torch.equal(weights["0.weight"], before["0.weight"])
        assert not torch.equal(weights["2.weight"], before["2.weight"])


@case()
def c78_checkpoints_of_two_models_stay_apart(prepare: Prepare, rank: int) -> None:
    generator, critic = mlp(1), mlp(2)
    with (
        prepare(generator, torch.optim.Adam(generator.parameters())) as first,
        prepare(critic, torch.optim.Adam(critic.parameters())) as second,
    ):
        for session in (first, second):
            train(session, steps=1)
        first.save(prepare.folder / "generator")
        second.save(prepare.folder / "critic")
        kept = train(first, steps=2, first=1)
        other = train(second, steps=2, first=1)
        first.load(prepare.folder / "generator")
        assert_close(second.full_weights(), other, 0)
        assert_close(train(first, steps=2, first=1), kept, 0)
        second.load(prepare.folder / "critic")
        assert_close(train(second, steps=2, first=1), other, 0)


@case()
def c78_parts_of_one_model_train_in_sessions_of_their_own(prepare: Prepare, rank: int) -> None:
    """Each session steps its own part; closing one leaves the other at work."""
    model, reference = nn.ModuleList([mlp(1), mlp(2)]), [mlp(1), mlp(2)]
    expected = [train_alone(part, sgd(part), steps=2 + at, parts=2) for at, part in enumerate(reference)]
    with prepare(model[1], sgd(model[1])) as second:
        with prepare(model[0], sgd(model[0])) as first:
            for index in range(2):
                train(first, steps=1, first=index)
                train(second, steps=1, first=index)
        assert_close(dict(model[0].state_dict()), expected[0])
        assert_close(train(second, steps=1, first=2), expected[1])


# Calls that must come on all ranks.


@case(raw=False)
def c59_a_call_on_one_rank_only_is_refused_and_training_goes_on(prepare: Prepare, rank: int) -> None:
    reference, model = mlp(), mlp()
    expected = train_alone(reference, sgd(reference), steps=9, parts=2)

    def evaluate(session: Session) -> None:
        with session.evaluate():
            pass

    calls = {
        "save": lambda session: session.save(prepare.folder),
        "load": lambda session: session.load(prepare.folder),
        "full_weights": lambda session: session.full_weights(),
        "evaluate": evaluate,
        "close": lambda session: session.close(),
    }
    with mock.patch.object(_processes, "RENDEZVOUS_SECONDS", 0.3), prepare(model, sgd(model)) as session:
        train(session, steps=1)
        for index, (name, call) in enumerate(calls.items(), 1):
            caller = index % 2
            if rank == caller:
                with pytest.raises(StateError, match=rf"{name}.*all ranks.* rank {1 - caller} of 2"):
                    call(session)
            train(session, steps=1, first=index)
        for index in (6, 7):
            session.backward(session.model(batch(index, rank)).square().mean())
            if rank == index - 6:
                with pytest.raises(StateError, match="full_gradients is collective: call it on all ranks"):
                    session.full_gradients()
            session.step()
    with prepare(model, sgd(model)) as session:
        assert_close(train(session, steps=1, first=8), expected)


# Copies.


@case(raw=False)
def c79_a_session_is_not_copied_and_says_what_to_do(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, steps=1)
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(StateError, match=r"session\.save.*full_weights"):
                copied(session)


@case(raw=False)
def c79_the_module_is_copied_whole_or_says_what_to_do(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, steps=1)
        session.model(batch(1, rank)).square().mean()
        weights = session.full_weights()
        for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
            for part in (session.model, session.model[0]):
                try:
                    twin = copied(part)
                except UnsupportedError as error:
                    assert "full_weights" in str(error)  # noqa: PT017
                    continue
                prefix = "" if part is session.model else "0."
                expected = {
                    name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)
                }
                assert_close(dict(twin.state_dict()), expected, 0)
                twin(batch(0, rank)).sum().backward()
                assert all(value.grad is not None for value in twin.parameters())
        reference = mlp()
        expected = train_alone(reference, sgd(reference), steps=2, parts=2)
        assert_close(train(session, steps=1, first=1), expected)
    assert_close(dict(copy.deepcopy(model).state_dict()), expected)
    assert_close(dict(pickle.loads(pickle.dumps(model)).state_dict()), expected)


# Random state.


class Dropped(nn.Module):
    """Keeps the mask of its last dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self) -> Tensor:
        out = nn.functional.dropout(self.w, 0.5)
        self.mask = [int(value) for value in out.detach() > 0]
        return out.sum()


def masks(session: Session, count: int = 2) -> list[list[int]]:
    found = []
    for _ in range(count):
        step(session, session.model())
        found.append(session.model.mask)
    return found


def masks_by_hand(seed: int, count: int = 2) -> list[list[int]]:
    torch.manual_seed(seed)
    return [[int(value) for value in nn.functional.dropout(torch.ones(64), 0.5) > 0] for _ in range(count)]


@case()
def dropout_differs_among_ranks_with_a_seed_and_is_the_users_without(prepare: Prepare, rank: int) -> None:
    for fields, seed in (({"seed": 7}, 7 + rank), ({}, 5)):
        expected = masks_by_hand(seed)
        model = Dropped()
        optimizer = sgd(model)
        torch.manual_seed(5)
        with prepare(model, optimizer, **fields) as session:
            assert masks(session) == expected
            session.save(prepare.folder)
            later = masks(session)
            session.load(prepare.folder)
            assert masks(session) == later
    assert masks_by_hand(7) != masks_by_hand(8)
