"""Forward and backward passes of every shape. Each value is worked out by hand or by plain torch in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit import Session
from shardkit.errors import StateError
from shardkit.testing.cases._models import (
    Prepare,
    W,
    alone,
    assert_close,
    assert_same_as_alone,
    batch,
    mean_square,
    mlp,
    sgd,
    step,
    together,
    train,
    train_alone,
)
from shardkit.testing.cases._table import case


class Coder(nn.Module):
    """An encoder and a decoder, whose parts can be called on their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


# Several forwards and backwards.


@case()
def parts_of_the_module_called_directly_count(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part)
        return model.encoder(x).square().mean() + model.decoder(model.encoder(2 * x)).square().mean()

    assert_same_as_alone(prepare, Coder, loss)


@case()
def parts_and_the_whole_called_for_one_loss_count(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part)
        return model(x).square().mean() + 0.5 * model.encoder(x).square().mean() + model(3 * x).abs().mean()

    assert_same_as_alone(prepare, Coder, loss, accumulate=2)


@case()
def one_layer_runs_forty_times(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part)
        for _ in range(40):
            x = torch.tanh(model[0](x))
        return x.square().mean()

    assert_same_as_alone(prepare, lambda: mlp(sizes=(8, 8)), loss, 2e-6)


@case()
def a_part_used_in_some_micro_batches_counts_with_the_rest_as_zero(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part)
        # Micro-batch 1 of three, on both ranks, does without the decoder; so does the last one of the second step.
        micro = part // 2
        return (model.encoder(x) if micro == 1 or (index, micro) == (1, 2) else model(x)).square().mean()

    assert_same_as_alone(prepare, Coder, loss, accumulate=3)


@case()
def several_losses_of_one_forward_go_as_one_sum(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        out = model(batch(index, part))
        return 0.3 * out.square().mean() + 0.7 * out.abs().sum(1).mean() + out[:, 0].exp().mean()

    assert_same_as_alone(prepare, Coder, loss)


@case(raw=False)
def two_losses_of_one_graph_go_as_two_micro_batches(prepare: Prepare, rank: int) -> None:
    # The first backward frees what both share unless it is told to keep it, which a session's can't: so each has its
    # own forward, or they go as one sum. What torch says of a freed graph reaches the user on every rank.
    model = Coder()
    with prepare(model, sgd(model), accumulate=2) as session:
        out = session.model(batch(0, rank))
        session.backward(out.square().mean())
        with pytest.raises(RuntimeError, match="second time"):
            session.backward(out.square().mean())
        with pytest.raises(StateError, match="backward failed with RuntimeError"):
            session.step()


@case()
def a_graph_that_the_user_goes_on_with_is_right_where_nothing_was_freed(prepare: Prepare, rank: int) -> None:
    # autograd.grad with retain_graph first, then the session's backward over the same graph.
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part).requires_grad_()
        out = model(x).square().mean()
        (saliency,) = torch.autograd.grad(out, x, retain_graph=True)
        return out * saliency.norm().item()

    def by_hand(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part).requires_grad_()
        (saliency,) = torch.autograd.grad(model(x).square().mean(), x)
        return model(batch(index, part)).square().mean() * saliency.norm().item()

    expected = alone(Coder(), by_hand)
    model = Coder()
    with prepare(model, sgd(model)) as session:
        assert_close(together(session, loss), expected)


# Two models.


@case()
def a_generator_learns_through_a_critic(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        return mlp(1, (8, 12, 8)), mlp(2, (8, 12, 1))

    def losses(generator: Any, critic: Any, index: int, part: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        noise, real = batch(index, part), batch(index + 50, part)
        of_critic = lambda: critic(generator(noise).detach()).mean() - critic(real).mean()  # noqa: E731
        of_generator = lambda: -critic(generator(noise)).mean()  # noqa: E731
        return of_critic, of_generator

    plain_generator, plain_critic = build()
    plain = [sgd(plain_generator), sgd(plain_critic)]
    for index in range(3):
        for which in (0, 1):
            for optimizer in plain:
                optimizer.zero_grad()
            (sum(losses(plain_generator, plain_critic, index, part)[which]() for part in range(2)) / 2).backward()
            plain[1 - which].step()
    generator, critic = build()
    with prepare(generator, sgd(generator)) as first, prepare(critic, sgd(critic)) as second:
        for index in range(3):
            of_critic, of_generator = losses(first.model, second.model, index, rank)
            assert step(second, of_critic())
            critic.requires_grad_(False)
            assert step(first, of_generator())
            critic.requires_grad_(True)
        assert_close(first.full_weights(), dict(plain_generator.state_dict()))
        assert_close(second.full_weights(), dict(plain_critic.state_dict()))


@case()
def a_critic_that_a_generators_loss_goes_through_keeps_its_own_gradients(prepare: Prepare, rank: int) -> None:
    """The critic isn't frozen: the generator's backward brings it gradients, between its windows and within one."""
    generator, critic = W(1), W(2)
    with prepare(generator, sgd(generator)) as first, prepare(critic, sgd(critic), accumulate=2) as second:
        for value in (1.0, 3.0):
            step(first, second.model(first.model([value + rank])))
            step(second, second.model([rank + value]))
        # The critic's gradient is the mean of 1, 2 and 3, 4; the generator's is the critic times 1.5, then 3.5.
        assert_close(second.full_weights()["w"], [1.75])
        assert_close(first.full_weights()["w"], [1 - 0.1 * 2 * 1.5 - 0.1 * 2 * 3.5])
        # And between the critic's backward and its step.
        step(second, second.model([1.0]))
        second.backward(second.model([3.0]))
        before = second.full_gradients()["w"]
        step(first, second.model(first.model([1.0])))
        assert_close(second.full_gradients()["w"], before)
        assert second.step()
        assert_close(second.full_weights()["w"], [1.55])


@case()
def a_teacher_without_optimizer_gives_targets(prepare: Prepare, rank: int) -> None:
    teacher = mlp(seed=5).requires_grad_(False)
    plain_teacher = copy.deepcopy(teacher)
    expected = alone(mlp(), lambda m, i, p: (m(batch(i, p)) - plain_teacher(batch(i, p))).square().mean())
    model = mlp()
    with prepare(teacher, None) as frozen, prepare(model, sgd(model)) as session:

        def loss(module: Any, index: int, part: int) -> Tensor:
            return (module(batch(index, part)) - frozen.model(batch(index, part))).square().mean()

        assert_close(together(session, loss), expected)
        assert_close(frozen.full_weights(), dict(plain_teacher.state_dict()))


@case()
def two_sessions_with_windows_of_different_lengths_interleave(prepare: Prepare, rank: int) -> None:
    first_model, second_model = mlp(1), mlp(2)
    reference = [mlp(1), mlp(2)]
    expected = [
        train_alone(reference[0], sgd(reference[0]), steps=3, parts=4),
        train_alone(reference[1], sgd(reference[1]), steps=2, parts=6, max_norm=0.05),
    ]
    with (
        prepare(first_model, sgd(first_model), accumulate=2) as first,
        prepare(second_model, sgd(second_model), accumulate=3, max_grad_norm=0.05) as second,
    ):
        for at in range(6):
            for session, length in ((first, 2), (second, 3)):
                rows = batch(at // length, at % length * 2 + rank)
                moved = step(session, session.model(rows).square().mean())
                assert moved == (at % length == length - 1)
        assert_close(first.full_weights(), expected[0])
        assert_close(second.full_weights(), expected[1])


# Second derivatives, and gradients that the user asks for.


@case(or_refused=True)
def a_penalty_on_the_gradient_of_inputs_is_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    with warnings.catch_warnings():
        # DistributedDataParallel remarks on a gradient with other strides than its parameter.
        warnings.filterwarnings("ignore", message="Grad strides do not match")
        assert_same_as_alone(prepare, lambda: mlp(sizes=(8, 16, 1)), loss, 2e-6, accumulate=2)


@case(or_refused=True)
def a_penalty_on_the_gradient_of_parameters_is_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        out = model(batch(index, part)).square().mean()
        slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + 0.1 * sum(slope.square().sum() for slope in slopes)

    assert_same_as_alone(prepare, mlp, loss, 2e-6)


@case(or_refused=True)
def a_product_of_the_hessian_and_a_vector_is_right(prepare: Prepare, rank: int) -> None:
    def product(model: Any, part: int) -> list[Tensor]:
        values = list(model.parameters())
        slopes = torch.autograd.grad(model(batch(0, part)).square().mean(), values, create_graph=True)
        return list(torch.autograd.grad(sum(slope.sum() for slope in slopes), values))

    expected = product(mlp(), rank)
    reference, model = mlp(), mlp()
    with prepare(model, sgd(model)) as session:
        for found, value in zip(product(session.model, rank), expected, strict=True):
            assert_close(found, value)
        assert_close(train(session, steps=2), train_alone(reference, sgd(reference), steps=2, parts=2))


@case()
def gradients_of_outputs_by_inputs_leave_the_step_alone(prepare: Prepare, rank: int) -> None:
    def slope(model: Any, part: int) -> Tensor:
        x = batch(7, part).requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    expected = slope(mlp(), rank)
    reference, model = mlp(), mlp()
    with prepare(model, sgd(model), accumulate=2) as session:
        assert_close(slope(session.model, rank), expected)
        session.backward(session.model(batch(0, rank)).square().mean())
        # In mid-window, and between the last backward and the step.
        assert_close(slope(session.model, rank), expected)
        session.step()
        session.backward(session.model(batch(0, 2 + rank)).square().mean())
        assert_close(slope(session.model, rank), expected)
        session.step()
        assert_close(session.full_weights(), train_alone(reference, sgd(reference), steps=1, parts=4))


# Checkpointing.


class Deep(nn.Module):
    """Blocks under gradient checkpointing: of each, nested, or with a layer that all share."""

    def __init__(self, *, reentrant: bool, nested: bool = False, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8) if shared else None
        self.reentrant, self.nested = reentrant, nested

    def block(self, at: int, x: Tensor) -> Tensor:
        return self.blocks[at](x if self.shared is None else torch.tanh(self.shared(x)))

    def all_blocks(self, x: Tensor) -> Tensor:
        for at in range(len(self.blocks)):
            x = checkpoint(self.block, at, x, use_reentrant=self.reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.nested:
            with warnings.catch_warnings():
                # The inner checkpoints run first without gradients, and torch remarks on it.
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
                return self.last(checkpoint(self.all_blocks, x, use_reentrant=self.reentrant))
        return self.last(self.all_blocks(x))


@case(or_refused=True)
def a_penalty_through_a_part_called_directly_is_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        x = batch(index, part).requires_grad_()
        code = model.encoder(x).tanh()
        (slope,) = torch.autograd.grad(code.sum(), x, create_graph=True)
        return model.decoder(code).square().mean() + slope.square().mean()

    assert_same_as_alone(prepare, Coder, loss, 2e-6)


@case()
def checkpointed_blocks_without_reentry_are_right(prepare: Prepare, rank: int) -> None:
    for fields in ({}, {"nested": True}, {"shared": True}):
        assert_same_as_alone(
            prepare, lambda f=fields: Deep(reentrant=False, **f), mean_square, accumulate=2, max_grad_norm=None
        )


@case(or_refused=True)
def reentrant_checkpointed_blocks_are_right(prepare: Prepare, rank: int) -> None:
    assert_same_as_alone(prepare, lambda: Deep(reentrant=True), mean_square, accumulate=2)


@case(or_refused=True)
def nested_reentrant_checkpointed_blocks_are_right(prepare: Prepare, rank: int) -> None:
    assert_same_as_alone(prepare, lambda: Deep(reentrant=True, nested=True), mean_square, accumulate=2)


@case(or_refused=True)
def reentrant_checkpointed_blocks_that_share_a_layer_are_right(prepare: Prepare, rank: int) -> None:
    assert_same_as_alone(prepare, lambda: Deep(reentrant=True, shared=True), mean_square)


def transformer(kind: str, *, reentrant: bool | None) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
            )
        )
    else:
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=32,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        )
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.train()
    if reentrant is not None:
        with warnings.catch_warnings():
            # Its name is another in newer releases.
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.config.use_cache = False
    return model


def text_loss(model: Any, index: int, part: int) -> Tensor:
    ids = torch.randint(1, 32, (2, 10), generator=torch.Generator().manual_seed(100 * index + part))
    return model(input_ids=ids, labels=ids).loss


def train_transformer(prepare: Prepare, kind: str, *, reentrant: bool) -> None:
    expected = alone(transformer(kind, reentrant=None), text_loss)
    model = transformer(kind, reentrant=reentrant)
    with prepare(model, sgd(model)) as session:
        assert_close(together(session, text_loss), expected, 5e-6)


@case()
def whole_transformers_checkpointed_without_reentry_are_right(prepare: Prepare, rank: int) -> None:
    for kind in ("gpt2", "t5"):
        train_transformer(prepare, kind, reentrant=False)


@case(or_refused=True)
def a_reentrant_checkpointed_gpt2_is_right(prepare: Prepare, rank: int) -> None:
    train_transformer(prepare, "gpt2", reentrant=True)


@case(or_refused=True)
def a_reentrant_checkpointed_t5_is_right(prepare: Prepare, rank: int) -> None:
    train_transformer(prepare, "t5", reentrant=True)


# Evaluation within a window.


@case()
def evaluation_within_a_window_changes_nothing(prepare: Prepare, rank: int) -> None:
    model, reference = mlp(), mlp()
    expected = train_alone(reference, sgd(reference), steps=2, parts=6)
    with prepare(model, sgd(model), accumulate=3) as session:
        for index in range(2):
            for micro in range(3):
                session.backward(session.model(batch(index, 2 * micro + rank)).square().mean())
                disturb(session)
                session.step()
                disturb(session)
        assert_close(session.full_weights(), expected)


def disturb(session: Session) -> None:
    """Evaluate in all ways, and run a forward with a graph that goes nowhere."""
    x = batch(9, 9)
    with torch.no_grad():
        expected = session.model(x)
    with session.evaluate() as module:
        assert_close(module(x), expected)
    session.model.eval()
    with torch.no_grad():
        assert_close(session.model(x), expected)
    with torch.inference_mode():
        assert_close(session.model(x), expected)
    session.model.train()
    dropped = session.model(x)
    assert dropped.requires_grad
    assert_close(dropped, expected)
