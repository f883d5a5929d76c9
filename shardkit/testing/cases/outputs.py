"""Outputs and inputs of any kind, and compiled modules."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

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
)
from shardkit.testing.cases._table import case

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
        x = x if isinstance(x, Tensor) else torch.from_numpy(x).float()
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
