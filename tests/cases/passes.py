"""Forward and backward passes of every shape. Each value is worked out by hand or by plain torch in one process."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit import Session
from shardkit.errors import InputError, NonFiniteError, StateError
from tests.cases._models import Prepare, W, assert_close, batch, mlp, sgd, step, train, train_alone
from tests.cases._table import case

Loss = Callable[[Any, int, int], Tensor]
"""The loss of a module at a step on one part of the global batch."""


def alone(model: nn.Module, loss: Loss, steps: int = 2, parts: int = 2, lr: float = 0.1) -> dict[str, Tensor]:
    """Return the weights that plain SGD reaches in one process on the mean over all parts."""
    optimizer = sgd(model, lr)
    for index in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, index, part) for part in range(parts)) / parts).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def together(session: Session, loss: Loss, steps: int = 2) -> dict[str, Tensor]:
    """Return the weights that the session reaches on the same parts."""
    for index in range(steps):
        for micro in range(session.strategy.accumulate):
            step(session, loss(session.model, index, micro * session.world_size + session.rank))
    return session.full_weights()


def assert_same_as_alone(
    prepare: Prepare, build: Callable[[], nn.Module], loss: Loss, tolerance: float = 1e-6, **fields: Any
) -> None:
    """Raise unless two steps of SGD under the strategy give the weights of one process."""
    expected = alone(build(), loss, parts=2 * fields.get("accumulate", 1))
    model = build()
    with prepare(model, sgd(model), **fields) as session:
        assert_close(together(session, loss), expected, tolerance)


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


SECOND = {"deepspeed:stage=3*": r"second derivatives.*deepspeed:stage=2"}


@case(refused=SECOND)
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


@case(refused=SECOND)
def a_penalty_on_the_gradient_of_parameters_is_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        out = model(batch(index, part)).square().mean()
        slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + 0.1 * sum(slope.square().sum() for slope in slopes)

    assert_same_as_alone(prepare, mlp, loss, 2e-6)


@case(refused=SECOND)
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


def mean_square(model: Any, index: int, part: int) -> Tensor:
    return model(batch(index, part)).square().mean()


@case(refused=SECOND)
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


REENTRANT = {"fairscale:shard=optimizer": "use_reentrant=False"}


@case(refused=REENTRANT)
def reentrant_checkpointed_blocks_are_right(prepare: Prepare, rank: int) -> None:
    assert_same_as_alone(prepare, lambda: Deep(reentrant=True), mean_square, accumulate=2)


@case(refused=REENTRANT)
def nested_reentrant_checkpointed_blocks_are_right(prepare: Prepare, rank: int) -> None:
    assert_same_as_alone(prepare, lambda: Deep(reentrant=True, nested=True), mean_square, accumulate=2)


@case(refused={**REENTRANT, "fairscale": "use_reentrant=False", "deepspeed:stage=2*": "came twice"})
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


@case(refused=REENTRANT)
def a_reentrant_checkpointed_gpt2_is_right(prepare: Prepare, rank: int) -> None:
    train_transformer(prepare, "gpt2", reentrant=True)


@case(refused=REENTRANT)
def a_reentrant_checkpointed_t5_is_right(prepare: Prepare, rank: int) -> None:
    train_transformer(prepare, "t5", reentrant=True)


# Outputs and inputs.


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    loss: Tensor
    extra: dict[str, Any]


class Opaque:
    """An object that nobody but the user knows."""

    def __init__(self, loss: Tensor, extra: dict[str, Any]) -> None:
        self._inner = [loss]
        self.extra = extra

    @property
    def loss(self) -> Tensor:
        return self._inner[0]


class Row(NamedTuple):
    loss: Tensor
    extra: dict[str, Any]


def model_output() -> Any:
    outputs = pytest.importorskip("transformers.utils").ModelOutput

    @dataclasses.dataclass
    class Output(outputs):  # type: ignore[misc, valid-type]
        loss: Any = None
        extra: Any = None

    return Output


class Wrapping(nn.Module):
    """Returns its loss within another object, which an inner module returned within another one."""

    def __init__(self, kind: Any, inner: Any) -> None:
        super().__init__()
        self.body = Inside(inner)
        self.unused = nn.Linear(2, 2)
        torch.manual_seed(3)
        self.head, self.kind = nn.Linear(6, 1), kind

    def forward(self, x: Tensor) -> Any:
        found = self.body(x)
        return self.kind(loss=self.head(found.loss).square().mean(), extra={"deep": [found.loss, ("note", None)]})


class Inside(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear, self.kind = nn.Linear(8, 6), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(loss=torch.tanh(self.linear(x)), extra={})


def train_wrapping(prepare: Prepare, kind: Any) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        out = model(batch(index, part))
        assert type(out) is kind
        assert out.extra["deep"][1] == ("note", None)
        return out.loss + 0.1 * out.extra["deep"][0].square().mean()

    assert_same_as_alone(prepare, lambda: Wrapping(kind, kind), loss)


@case()
def outputs_within_a_named_tuple_are_right(prepare: Prepare, rank: int) -> None:
    train_wrapping(prepare, Row)


@case()
def outputs_within_a_frozen_dataclass_with_slots_are_right(prepare: Prepare, rank: int) -> None:
    train_wrapping(prepare, Slotted)


@case()
def outputs_within_a_model_output_are_right(prepare: Prepare, rank: int) -> None:
    train_wrapping(prepare, model_output())


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    value: Tensor
    parts: tuple[Any, ...]


@case()
def a_module_with_parameters_of_its_own_may_return_a_dataclass(prepare: Prepare, rank: int) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Result:
            return Result(x @ self.weight, ("note", x.sum() * self.weight.mean()))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, x: Tensor) -> Any:
            first = self.first(x)
            assert type(first) is Result
            second = self.second(torch.tanh(first.value))
            return second.value.square().mean() + first.parts[1] + second.parts[1], 3, "text"

    assert_same_as_alone(prepare, Two, lambda m, i, p: m(batch(i, p))[0], 2e-6)


@case()
def a_module_may_return_what_is_no_tensor(prepare: Prepare, rank: int) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> int:
            return len(x)

    class Whole(W):
        def __init__(self) -> None:
            super().__init__(1)
            self.counting = Counting()

        def forward(self, x: Any) -> Tensor:
            return super().forward(x) * self.counting(torch.ones(2))

    model = Whole()
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])


@case()
def outputs_within_an_object_of_the_users_own_are_right(prepare: Prepare, rank: int) -> None:
    train_wrapping(prepare, Opaque)


class Reading(nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = mlp(sizes=(8, 4))

    def forward(self, *args: Any, table: Any = None, mode: str = "", count: int = 0, marker: Any = None) -> Tensor:
        assert mode == "mean"
        assert count == 3
        assert args in ((), (None, "text", b"bytes"))
        x = table["x"]
        x = torch.from_numpy(x).float() if isinstance(x, np.ndarray) else x
        weight, bias = self.linear[0].weight, self.linear[0].bias
        if x.is_sparse:
            return (torch.sparse.mm(x, weight.t()) + bias).square().mean()
        return self.linear(x).square().mean()


@case()
def inputs_of_any_kind_are_right(prepare: Prepare, rank: int) -> None:
    marker = object()

    def loss(model: Any, index: int, part: int) -> Tensor:
        x: Any = batch(index, part)
        positional = (None, "text", b"bytes")
        if index == 1:
            x, positional = x.double().numpy(), ()
        return model(*positional, table={"x": x}, mode="mean", count=3, marker=marker)

    assert_same_as_alone(prepare, Reading, loss)


@case()
def sparse_inputs_are_right(prepare: Prepare, rank: int) -> None:
    def loss(model: Any, index: int, part: int) -> Tensor:
        return model(table={"x": batch(index, part).relu().to_sparse()}, mode="mean", count=3)

    assert_same_as_alone(prepare, Reading, loss)


# Compiled.


@case()
def a_model_compiled_before_prepare_is_right(prepare: Prepare, rank: int) -> None:
    compile_and_train(prepare, "before")


@case()
def a_model_compiled_after_prepare_is_right(prepare: Prepare, rank: int) -> None:
    compile_and_train(prepare, "after")


@case()
def a_model_compiled_in_place_is_right(prepare: Prepare, rank: int) -> None:
    compile_and_train(prepare, "in place")


def compile_and_train(prepare: Prepare, when: str) -> None:
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        expected = alone(mlp(sizes=(8, 16, 8)), mean_square)
        model: Any = mlp(sizes=(8, 16, 8))
        bare = model
        if when == "before":
            model = torch.compile(model, backend=backend)
        elif when == "in place":
            model.compile(backend=backend)
        with warnings.catch_warnings():
            # The compiler remarks on the hooks of a library, and on gradients that it looks at itself.
            warnings.simplefilter("ignore")
            with prepare(model, sgd(bare)) as session:
                module = torch.compile(session.model, backend=backend) if when == "after" else session.model
                for index in range(2):
                    step(session, mean_square(module, index, session.rank))
                assert_close(session.full_weights(), expected)


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


SHARDS_GRADIENTS = ("fairscale", "deepspeed:stage=1", "deepspeed:stage=2", "deepspeed:stage=3")


def shards_gradients(prepare: Prepare) -> bool:
    return prepare.text.partition(",")[0] in SHARDS_GRADIENTS


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
        for index in range(2):
            optimizer.zero_grad()
            reference(torch.cat([batch(index, part) for part in range(4)])).square().mean().backward()
            if not shards_gradients(prepare):
                change(reference)
            optimizer.step()
        with prepare(model, sgd(model), accumulate=2) as session:
            for index in range(2):
                for micro in range(2):
                    session.backward(session.model(batch(index, 2 * micro + rank)).square().mean())
                    if micro == 1 and shards_gradients(prepare):
                        with pytest.raises(StateError, match=r"full_gradients.*max_grad_norm"):
                            change(session.model)
                        assert list(session.full_gradients()) == [name for name, _ in model.named_parameters()]
                        with pytest.raises(StateError, match="full_gradients"):
                            change(session.model)
                    elif micro == 1:
                        change(session.model)
                    session.step()
            assert_close(session.full_weights(), dict(reference.state_dict()))
        assert {type(value) for value in model.parameters()} == {nn.Parameter}
        assert all(value.grad is None for value in model.parameters())


@case()
def c68_what_is_copied_between_backward_and_step_can_be_trained(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        session.backward(session.model(batch(0, rank)).square().mean())
        if "stage=3" not in prepare.text:
            copied = nn.Parameter(torch.ones(1)) if prepare.text == "ddp" else copy.deepcopy(model[0].bias)
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
