"""Parameters and state: frozen, thawed, unused, tied, of any type and size, loaded and changed in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit.errors import ShardkitError
from shardkit.testing.cases._models import (
    Prepare,
    Two,
    W,
    adamw,
    assert_close,
    batch,
    heavy,
    mean_square,
    mlp,
    same_as_alone,
    sgd,
    step,
)
from shardkit.testing.cases._table import case


class Branches(nn.Module):
    """Three branches, of which a call uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(8, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        hidden = self.stem(x).tanh()
        return sum((self.branches[index](hidden).square().mean() for index in use), hidden.square().mean())


def _branches(prepare: Prepare, use: Callable[[int, int], tuple[int, ...]], **fields: Any) -> None:
    """Train branches as in one process, where ``use(step, part)`` says which of them a part of the batch uses."""
    for make in (adamw, heavy):

        def build(make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = Branches()
            return model, make(model.parameters())

        same_as_alone(prepare, build, lambda m, i, part: m(batch(i, part), use(i, part)), steps=4, **fields)


@case()
def a_parameter_that_is_never_used_is_left_alone(prepare: Prepare, rank: int) -> None:
    _branches(prepare, lambda index, part: (0, 2))


@case()
def a_parameter_that_a_step_leaves_out_is_left_alone_in_it(prepare: Prepare, rank: int) -> None:
    _branches(prepare, lambda index, part: (0,) if index % 2 else (0, 1, 2), max_grad_norm=0.1)


@case()
def a_parameter_that_one_micro_batch_uses_has_its_share_of_the_window(prepare: Prepare, rank: int) -> None:
    _branches(prepare, lambda index, part: (0, 1) if part < 2 else (0,), accumulate=3)
    _branches(prepare, lambda index, part: (0, 1) if part >= 4 else (0, 2), accumulate=3, max_grad_norm=0.1)


@case(or_refused=True)
def a_parameter_that_one_rank_uses_has_its_share(prepare: Prepare, rank: int) -> None:
    for only in (0, 1):
        _branches(prepare, lambda index, part, only=only: (0, 1) if part % 2 == only else (0,))


@case(or_refused=True)
def a_parameter_that_one_rank_uses_in_one_window_has_its_share(prepare: Prepare, rank: int) -> None:
    _branches(prepare, lambda index, part: (0, 1) if index == 2 and part == 1 else (0,), accumulate=2)
    _branches(prepare, lambda index, part: (0, 1) if index == 1 and part == 3 else (2,), accumulate=2)


def _train_frozen(prepare: Prepare, frozen: Callable[[int], bool], whole: bool = False, **fields: Any) -> None:
    """Train as in one process while the first layer is frozen in the steps that ``frozen`` says, and at -1: before."""

    def freeze(model: nn.Module, index: int) -> None:
        for value in model[0].parameters() if not whole else model.parameters():
            value.requires_grad_(not frozen(index))

    for make in (adamw, heavy):

        def build(make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = mlp(sizes=(8, 6, 5, 4))
            freeze(model, -1)
            return model, make(model.parameters())

        same_as_alone(prepare, build, mean_square, 5, change=lambda m, o, i: freeze(m, i), **fields)


@case()
def a_parameter_frozen_from_the_start_stays(prepare: Prepare, rank: int) -> None:
    _train_frozen(prepare, lambda index: True, accumulate=2)


@case()
def a_parameter_frozen_in_mid_run_stays_until_it_is_thawed(prepare: Prepare, rank: int) -> None:
    _train_frozen(prepare, lambda index: index in (1, 2))
    _train_frozen(prepare, lambda index: index in (0, 3), accumulate=2, max_grad_norm=0.1)


@case(or_refused=True)
def a_parameter_thawed_in_mid_run_trains_from_then_on(prepare: Prepare, rank: int) -> None:
    _train_frozen(prepare, lambda index: index < 2)
    _train_frozen(prepare, lambda index: index < 1, accumulate=2, max_grad_norm=0.1)


@case()
def groups_that_are_empty_or_frozen_train_nothing(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 6, 5, 4))
        model[0].requires_grad_(False)
        parts = [{"params": [], "lr": 5.0}, *({"params": list(model[i].parameters())} for i in (0, 2, 4))]
        return model, adamw([*parts, {"params": [], "lr": 7.0}])

    same_as_alone(prepare, build, mean_square)


@case()
def a_parameter_that_no_group_holds_stays(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 6, 5, 4))
        return model, heavy([*model[0].parameters(), *model[4].parameters()])

    same_as_alone(prepare, build, mean_square, max_grad_norm=0.1)


@case(raw=False)
def a_parameter_frozen_on_one_rank_only_is_right_or_refused(prepare: Prepare, rank: int) -> None:
    model = Two(1, 1)
    try:
        with prepare(model, sgd(model)) as session:
            model.b.requires_grad_(rank == 0)
            step(session, session.model(1.0))
            # As a rank on which it isn't used: half of the gradient of the mean.
            weights = session.full_weights()
            assert_close([weights["a"].item(), weights["b"].item()], [0.7, 0.8])
    except ShardkitError as error:
        assert "'b' requires a gradient on some ranks only" in str(error)  # noqa: PT017


class Tied(nn.Module):
    """One layer under three names, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.more = nn.ModuleList([self.first])

    def forward(self, x: Tensor) -> Tensor:
        return self.more[0](self.second(self.first(x).tanh()))


@case()
def a_tied_parameter_gets_the_sum_of_its_gradients(prepare: Prepare, rank: int) -> None:
    for make in (adamw, heavy):

        def build(make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = Tied()
            return model, make(model.parameters())

        same_as_alone(prepare, build, mean_square, accumulate=2, max_grad_norm=0.1)


@case(or_refused=True)
def parameters_that_share_memory_are_updated_both(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two(1, 1)
        model.b.data = model.a.data
        return model, sgd(model)

    same_as_alone(prepare, build, lambda m, i, part: m(part + 1.0), steps=2)


@case()
def parameters_of_any_shape_train_side_by_side(prepare: Prepare, rank: int) -> None:
    class Shapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            shapes = [(), (1,), (3, 1, 2), (), (7,), (2, 2, 2, 2), (1, 1)]
            self.held = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

        def forward(self, x: Tensor) -> Tensor:
            return sum((value.square().sum() * x[0, i] for i, value in enumerate(self.held)), x.sum() * 0)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shapes()
        # Not contiguous in memory.
        model.held.append(nn.Parameter(torch.randn(5, 3).t()))
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, lambda m, i, part: m(batch(i, part, width=9)), max_grad_norm=1.0)


@case(raw=False)
def a_parameter_larger_than_any_bucket_trains_beside_small_ones(prepare: Prepare, rank: int) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # 28 MiB, where libraries send 25 MiB at a time, or a million elements.
            self.large = nn.Parameter(torch.ones(7, 2**20))
            self.small = nn.Parameter(torch.ones(3))

        def forward(self, x: float) -> Tensor:
            return (self.large * x).sum() + (self.small * 2 * x).sum()

    model = Large()
    with prepare(model, sgd(model), accumulate=2) as session:
        for micro in range(2):
            step(session, session.model(2.0 * micro + rank))
        weights = session.full_weights()
    # The mean of 0, 1, 2 and 3.
    assert_close(weights["small"], [0.7] * 3)
    assert_close(weights["large"].min(), 0.85)
    assert_close(weights["large"].max(), 0.85)


@case(or_refused=True)
def a_parameter_without_elements_trains_beside_others(prepare: Prepare, rank: int) -> None:
    class Empty(W):
        def __init__(self) -> None:
            super().__init__(1)
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Any) -> Tensor:
            return super().forward(x) + self.empty.sum()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Empty()
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, lambda m, i, part: m([part + 1.0]), max_grad_norm=0.5)
    same_as_alone(prepare, build, lambda m, i, part: m([part + 1.0]), accumulate=2)


@case(or_refused=True)
def a_model_in_double_precision_trains_in_double_precision(prepare: Prepare, rank: int) -> None:
    def loss(model: nn.Module, index: int, part: int) -> Tensor:
        return model(batch(index, part).double()).square().mean()

    for make, fields in ((adamw, {}), (heavy, {"accumulate": 3, "max_grad_norm": 0.1}), (sgd, {"max_grad_norm": 1e-3})):

        def build(make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = mlp().double()
            return model, sgd(model) if make is sgd else make(model.parameters())

        same_as_alone(prepare, build, loss, steps=4, tolerance=1e-12, **fields)
    model = Two().double()
    with prepare(model, sgd(model), track_grad_norm=True) as session:
        step(session, session.model([1 / 3, 2 / 3][rank]))
        assert session.grad_norm == pytest.approx(2.5, rel=1e-14)
    model = Two().double()
    with prepare(model, sgd(model)) as session:
        session.backward(session.model([1 / 3, 2 / 3][rank]))
        assert_close(session.full_gradients()["a"], torch.tensor([1.5], dtype=torch.double), 1e-15)
        session.step()


class Mixed(nn.Module):
    """A layer in float32 and one in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.single, self.double_ = nn.Linear(8, 6), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.double_(self.single(x).tanh().double())


@case(or_refused=True)
def a_model_of_two_dtypes_trains_each_in_its_own(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Mixed()
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, mean_square, tolerance=1e-6)
    # One of them on one rank only.
    weighted = lambda m, i, part: m.double_(torch.ones(6).double()).sum() if part % 2 else mean_square(m, i, part)  # noqa: E731
    if "parameters" not in prepare.shards:
        same_as_alone(prepare, build, weighted, tolerance=1e-6)


@case(or_refused=True)
def a_complex_parameter_trains_in_both_parts(prepare: Prepare, rank: int) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.tensor([1.0 + 2.0j, 0.5 - 1.0j]))
            self.w = nn.Parameter(torch.tensor([1.0]))

        def forward(self, x: float) -> Tensor:
            return (self.c * (x + 1j)).abs().square().sum() * self.w.sum() + (self.c.imag * x).sum()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Complex()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    same_as_alone(prepare, build, lambda m, i, part: m(0.5 + part), tolerance=1e-5)
    same_as_alone(prepare, build, lambda m, i, part: m(0.5 + part), tolerance=1e-5, accumulate=2, max_grad_norm=0.5)


class Words(nn.Module):
    """Sparse embeddings, one of them in a bag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(10, 3, sparse=True)
        self.bag = nn.EmbeddingBag(12, 3, mode="sum", sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor, bagged: bool = True) -> Tensor:
        hidden = self.words(words)
        return self.head(hidden + self.bag(words.view(-1, 1) + 1) if bagged else hidden).square().mean()


def _words(index: int, part: int) -> Tensor:
    return torch.randint(0, 10, (5,), generator=torch.Generator().manual_seed(100 * index + part))


@case(or_refused=True)
def sparse_gradients_are_averaged(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        return model, torch.optim.SGD(model.parameters(), lr=0.3)

    for fields in ({}, {"accumulate": 2}):
        same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part)), steps=4, **fields)
        # The bag on one rank only.
        same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part), bool(part % 2)), steps=4, **fields)


@case(or_refused=True)
def the_optimizer_for_sparse_gradients_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words().requires_grad_(False)
        model.words.weight.requires_grad_(True)
        return model, torch.optim.SparseAdam([model.words.weight], lr=0.05)

    same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part)), steps=4)


@case(or_refused=True)
def the_norm_of_sparse_gradients_is_that_of_the_dense_ones(prepare: Prepare, rank: int) -> None:
    model = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(model.weight)
    with prepare(model, sgd(model), track_grad_norm=True) as session:
        # Row 0 twice, so that it must be added up before its norm is taken: gradient (3, 4, 0, 0).
        step(session, (model(torch.tensor([0, 0, 1])) * torch.tensor([[1.0], [2.0], [4.0]])).sum())
        assert session.grad_norm == pytest.approx(5.0)
        assert_close(session.full_weights()["weight"], [[-0.3], [-0.4], [0.0], [0.0]])


class _Rows(torch.autograd.Function):
    """Looks up rows, and gives a sparse gradient that no module's setting tells of."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(rows[None], gradient, ctx.shape, check_invariants=False), None


class Table(nn.Module):
    """A table that is looked up sparsely or densely, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.table, self.w = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x: int, how: str) -> Tensor:
        rows = torch.tensor([x % 6, (x * 2 + 1) % 6])
        if how == "none":
            return self.w.sum() * x
        found = _Rows.apply(self.table, rows) if how == "sparse" else self.table[rows]
        return (found * self.w).square().sum() * 0.1


def _table() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Table()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@case(or_refused=True)
def a_sparse_gradient_that_shows_in_backward_is_averaged(prepare: Prepare, rank: int) -> None:
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse"), steps=3)
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse"), steps=3, accumulate=2)


@case(or_refused=True)
def a_sparse_gradient_that_shows_on_one_rank_is_averaged(prepare: Prepare, rank: int) -> None:
    for other in ("none", "dense"):
        for only in (0, 1):
            same_as_alone(
                prepare,
                _table,
                lambda m, i, part, other=other, only=only: m(i + part, "sparse" if part % 2 == only else other),
                steps=3,
            )


@case(or_refused=True)
def a_sparse_gradient_that_shows_in_a_later_step_is_averaged(prepare: Prepare, rank: int) -> None:
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse" if i else "dense"), steps=3)
