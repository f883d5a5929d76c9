"""Parameters and state: frozen, thawed, unused, tied, of any type and size, loaded and changed in mid-run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardkit.errors import InputError, MismatchError, ShardkitError, StateError, UnsupportedError
from tests.cases._models import Prepare, Two, W, assert_close, batch, mlp, same_as_alone, sgd, step, train
from tests.cases._table import case

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def adamw(given: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW whose decay shows whether a parameter without a gradient was left alone."""
    return torch.optim.AdamW(given, lr=1e-2, weight_decay=0.3, **settings)


def heavy(given: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return SGD whose momentum shows whether a gradient was none or zero."""
    return torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, **settings)


def mean_square(model: nn.Module, index: int, part: int) -> Tensor:
    return model(batch(index, part)).square().mean()


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


_STEM = {"deepspeed:stage=3*": "the ranks parted.*deepspeed:stage=2 or ddp"}


@case(refused=_STEM)
def a_parameter_that_one_rank_uses_has_its_share(prepare: Prepare, rank: int) -> None:
    for only in (0, 1):
        _branches(prepare, lambda index, part, only=only: (0, 1) if part % 2 == only else (0,))


@case(refused=_STEM)
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


@case(refused={"deepspeed:stage=[123]*": "frozen when the session was prepared.*deepspeed:stage=0 or ddp"})
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


_MEMORY = "'b' and 'a' share memory|'a' and 'b' share memory"


@case(refused={"deepspeed:stage=[123]*": f"({_MEMORY}).*stage=0 or ddp", "fairscale*": f"({_MEMORY}).*'ddp'"})
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


@case(refused={"deepspeed:stage=3*": "'empty', which has no elements.*deepspeed:stage=2 or ddp"})
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


@case(refused={"deepspeed*": "is torch.float64: use .*ddp"})
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


@case(
    refused={
        "deepspeed*": "is torch.float64: use .*ddp",
        "fairscale*": "one dtype.*strategy 'ddp'",
    }
)
def a_model_of_two_dtypes_trains_each_in_its_own(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Mixed()
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, mean_square, tolerance=1e-6)
    # One of them on one rank only.
    weighted = lambda m, i, part: m.double_(torch.ones(6).double()).sum() if part % 2 else mean_square(m, i, part)  # noqa: E731
    if "stage=3" not in prepare.text:
        same_as_alone(prepare, build, weighted, tolerance=1e-6)


@case(refused={"deepspeed*": "is torch.complex64: use ddp", "fairscale*": "complex.*'ddp'"})
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


_DENSE = {"deepspeed*": "sparse.*ddp", "fairscale*": "sparse.*'ddp'"}


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


@case(refused=_DENSE)
def sparse_gradients_are_averaged(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        return model, torch.optim.SGD(model.parameters(), lr=0.3)

    for fields in ({}, {"accumulate": 2}):
        same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part)), steps=4, **fields)
        # The bag on one rank only.
        same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part), bool(part % 2)), steps=4, **fields)


@case(refused=_DENSE)
def the_optimizer_for_sparse_gradients_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words().requires_grad_(False)
        model.words.weight.requires_grad_(True)
        return model, torch.optim.SparseAdam([model.words.weight], lr=0.05)

    same_as_alone(prepare, build, lambda m, i, part: m(_words(i, part)), steps=4)


@case(refused=_DENSE)
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


@case(refused={"fairscale*": "sparse.*'ddp'"})
def a_sparse_gradient_that_shows_in_backward_is_averaged(prepare: Prepare, rank: int) -> None:
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse"), steps=3)
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse"), steps=3, accumulate=2)


@case(
    refused={"fairscale": "sparse.*'ddp'"},
    left_out={"fairscale:shard=optimizer": "only the rank that meets it is refused, and the others wait until it ends"},
)
def a_sparse_gradient_that_shows_on_one_rank_is_averaged(prepare: Prepare, rank: int) -> None:
    for other in ("none", "dense"):
        for only in (0, 1):
            same_as_alone(
                prepare,
                _table,
                lambda m, i, part, other=other, only=only: m(i + part, "sparse" if part % 2 == only else other),
                steps=3,
            )


@case(refused={"fairscale*": "sparse.*'ddp'", "ddp": "sparse.*overlap=false"})
def a_sparse_gradient_that_shows_in_a_later_step_is_averaged(prepare: Prepare, rank: int) -> None:
    same_as_alone(prepare, _table, lambda m, i, part: m(i + part, "sparse" if i else "dense"), steps=3)


@case()
def weights_loaded_after_prepare_hold_from_then_on(prepare: Prepare, rank: int) -> None:
    loaded = dict(mlp(seed=9).state_dict())

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model.load_state_dict(loaded)
        if index == 2:
            model.load_state_dict({"0.bias": torch.arange(16.0)}, strict=False)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, mean_square, steps=4, change=change)
    same_as_alone(prepare, build, mean_square, steps=4, change=change, accumulate=2, max_grad_norm=0.1)


@case()
def weights_loaded_into_a_part_hold_from_then_on(prepare: Prepare, rank: int) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model[2].load_state_dict(dict(mlp(seed=9)[2].state_dict()))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, heavy(model.parameters())

    same_as_alone(prepare, build, mean_square, steps=3, change=change)


_WRITTEN = {"deepspeed:stage=3*": "load_state_dict.*deepspeed:stage=2 or ddp"}


@case(refused=_WRITTEN)
def weights_written_in_place_hold_from_then_on(prepare: Prepare, rank: int) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            with torch.no_grad():
                for value in model.parameters():
                    value.mul_(0.5)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, adamw(model.parameters())

    same_as_alone(prepare, build, mean_square, steps=3, change=change)


@case()
def weights_written_through_data_hold_from_then_on_or_fail(prepare: Prepare, rank: int) -> None:
    value = torch.full((16,), 0.25)

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 1:
            model[0].bias.data.copy_(value)
        if index == 2:
            model[2].weight.data.add_(0.1)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, adamw(model.parameters())

    if "stage=3" in prepare.text:
        with pytest.raises(RuntimeError):
            same_as_alone(prepare, build, mean_square, steps=2, change=change)
    else:
        same_as_alone(prepare, build, mean_square, steps=4, change=change)


@case(left_out={"deepspeed:stage=3*": "to load is collective there, and the next case"}, raw=False)
def weights_loaded_on_one_rank_only_are_refused_at_the_next_step(prepare: Prepare, rank: int) -> None:
    for only, part in itertools.product((0, 1), (False, True)):
        model = mlp()
        with prepare(model, sgd(model)) as session:
            train(session, 1)
            loaded = mlp(seed=9)
            if rank == only:
                (model[0] if part else model).load_state_dict((loaded[0] if part else loaded).state_dict())
            session.backward(mean_square(session.model, 1, rank))
            with pytest.raises(MismatchError, match=r"load_state_dict.*rank 0: .*; rank 1: "):
                session.step()
            if rank != only:
                (model[0] if part else model).load_state_dict((loaded[0] if part else loaded).state_dict())
            assert session.step()
            train(session, 1, first=2)


@case(raw=False)
def other_weights_loaded_on_each_rank_are_refused_at_the_next_step(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, 1)
        model.load_state_dict(mlp(seed=9 + rank).state_dict())
        session.backward(mean_square(session.model, 1, rank))
        with pytest.raises(MismatchError, match=r"load_state_dict"):
            session.step()


_WHOLE = "to load isn't collective there"


@case(left_out={"ddp*": _WHOLE, "fairscale*": _WHOLE, "deepspeed:stage=[012]*": _WHOLE})
def a_collective_load_on_one_rank_only_ends(prepare: Prepare, rank: int) -> None:
    from shardkit_deepspeed import _meeting

    # The rank need not wait as long as it would for slow ones.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meeting, "_PATIENCE_SECONDS", 4)
        _load_on_one_rank(prepare, rank)


def _load_on_one_rank(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, 1)
        if rank == 0:
            with pytest.raises(StateError, match="load_state_dict, which is collective: call it on all ranks"):
                model.load_state_dict(mlp(seed=9).state_dict())
        train(session, 1, first=1)
        model.load_state_dict(mlp(seed=9).state_dict())
        assert_close(session.full_weights(), dict(mlp(seed=9).state_dict()), 0.0)


class Buffered(nn.Module):
    """Buffers of several kinds, which a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.tensor([False, True]))
        self.register_buffer("phase", torch.tensor([1.0 + 0.0j]))
        self.register_buffer("exact", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1 + int(x.sum())
            self.flag = ~self.flag
            self.phase *= torch.exp(1j * x.sum())
            self.exact += x.sum().double() / 3
            self.hidden = self.hidden + x.mean()
        return (self.scale * x).sum() + self.hidden.sum()


@case()
def buffers_of_any_kind_are_those_of_rank_0_after_a_step(prepare: Prepare, rank: int) -> None:
    model, alone = Buffered(), Buffered()
    with prepare(model, sgd(model), accumulate=2) as session:
        for index in range(3):
            for micro in range(2):
                x = torch.full((2,), 1.0 + index + micro)
                alone(x)
                step(session, session.model(x + 10 * rank))
        for name in ("calls", "flag", "phase", "exact", "hidden"):
            assert torch.equal(getattr(session.model, name), getattr(alone, name)), name
        assert "hidden" not in session.full_weights()
        assert session.full_weights()["calls"] == alone.calls
        with session.evaluate() as module:
            told = [torch.empty(()), torch.empty(())]
            dist.all_gather(told, module(torch.ones(2)))
            assert torch.equal(told[0], told[1])
        session.save(prepare.folder)
        model.calls += 5
        session.load(prepare.folder)
        assert model.calls == alone.calls


@case(raw=False)
def a_norm_over_all_ranks_batches_is_refused_on_the_cpu(prepare: Prepare, rank: int) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    with pytest.raises(InputError, match="'1' is a SyncBatchNorm, which torch computes on GPUs only"):
        prepare(model, sgd(model))


@case()
def a_moving_average_of_the_whole_weights_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    model, alone = mlp(), mlp()
    plain = adamw(alone.parameters())
    expected = {name: value.clone() for name, value in alone.state_dict().items()}
    with prepare(model, adamw(model.parameters())) as session:
        found = session.full_weights()
        for index in range(4):
            train(session, 1, first=index)
            plain.zero_grad()
            alone(torch.cat([batch(index, 0), batch(index, 1)])).square().mean().backward()
            plain.step()
            for kept, now in ((found, session.full_weights()), (expected, alone.state_dict())):
                for name, value in now.items():
                    kept[name].lerp_(value, 0.25)
        assert_close(found, expected, 2e-6)


@case(refused={"deepspeed:stage=3*": "full_weights"})
def torchs_averaged_model_is_right_or_refused(prepare: Prepare, rank: int) -> None:
    model, alone = mlp(), mlp()
    plain = adamw(alone.parameters())
    expected = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    with prepare(model, adamw(model.parameters())) as session:
        averaged = AveragedModel(session.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        for index in range(4):
            train(session, 1, first=index)
            plain.zero_grad()
            alone(torch.cat([batch(index, 0), batch(index, 1)])).square().mean().backward()
            plain.step()
            expected.update_parameters(alone)
            averaged.update_parameters(session.model)
        assert_close(dict(averaged.state_dict()), dict(expected.state_dict()), 2e-6)
        # Loading into the copy is the user's own affair, on whatever rank.
        if rank == 0:
            averaged.load_state_dict(expected.state_dict())
        train(session, 1, first=4)


@case(raw=False)
def a_frozen_model_with_an_optimizer_is_refused_or_trains_nothing(prepare: Prepare, rank: int) -> None:
    model = mlp().requires_grad_(False)
    try:
        with prepare(model, sgd(model)) as session, pytest.raises(InputError, match="no gradient"):
            session.backward(session.model(batch(0, 0)).sum())
    except InputError as error:
        assert "all parameters of the optimizer are frozen" in str(error)  # noqa: PT017


@case(raw=False)
def a_refusal_at_prepare_leaves_the_model_to_another_strategy(prepare: Prepare, rank: int) -> None:
    model = W(1)
    model.w.data = model.w.data.to(torch.bfloat16)
    try:
        with prepare(model, sgd(model)) as session:
            step(session, session.model([1.0]))
            return
    except UnsupportedError as error:
        assert "ddp" in str(error)  # noqa: PT017
    assert_close(model.w.detach().float(), [1.0])
    with Prepare("ddp", prepare.folder)(model, sgd(model)) as session:
        step(session, session.model([1.0]))
        assert_close(session.full_weights()["w"].float(), [0.9], 1e-2)
