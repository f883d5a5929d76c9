"""fsdp that gathers in low precision. What is expected is by hand, or by plain torch in one process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shardkit_fsdp._held import Held
from torch import Tensor, nn

import shardkit
from shardkit import Session, Strategy
from shardkit.errors import StrategyError, UnsupportedError
from shardkit.testing import run
from shardkit.testing._suite import case_outcomes
from shardkit.testing.cases._models import assert_close, batch, mlp, sgd, step, train
from tests.parity.models import MODELS
from tests.parity.tolerances import HALF_WEIGHTS_OVER_AUTOCAST
from tests.planner.test_footprints_of_whole_weights import MIB, told
from tests.plugins.test_deepspeed_half import SEEDS, STEPS, adamw, distances, expected
from tests.plugins.test_fsdp import Stack
from tests.plugins.test_fsdp_footprint import stack

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FINE = 1 + 2.0**-12
"""No number of bf16 or fp16."""

CHECKS: dict[str, Callable[[int, Path], None]] = {}


def check(function: Callable[[int, Path], None]) -> Callable[[int, Path], None]:
    """Add a check that runs on two ranks, in one launch with the others."""
    CHECKS[function.__name__] = function
    return function


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, gather: str = "low", **fields: Any) -> Session:
    options = {"gather": gather, **fields.pop("options", {})}
    return shardkit.prepare(model, optimizer, Strategy("fsdp", **{"precision": "bf16", **fields}, options=options))


class Table(nn.Module):
    """A weight of two dimensions that ``use`` takes."""

    def __init__(self, use: Callable[[nn.Parameter, Any], Tensor], value: float = FINE, rows: int = 2) -> None:
        super().__init__()
        self.use, self.seen = use, [None]
        self.weight = nn.Parameter(torch.full((rows, 4), value))

    def forward(self, x: Any) -> Tensor:
        return self.use(self.weight, x)


# What is held and sent.


@check
def what_is_sent_and_what_is_whole_is_half_as_many_bytes(rank: int, folder: Path) -> None:
    found = {}
    for gather in ("fp32", "low"):
        model = Stack()
        with prepare(model, sgd(model), gather) as session:
            engine: Any = session._engine
            sent, whole = [], []
            for group in engine._shards.groups:
                group._all_gather_comm = _Watched(group._all_gather_comm, sent)

            def look(*_: Any, engine: Any = engine, whole: Any = whole) -> None:
                whole.append(sum(held.all_gather_outputs[0].untyped_storage().nbytes() for held in engine._held))

            model.blocks[1].linear.register_forward_hook(look)
            step(session, session.model(batch(0, rank)).square().mean())
            found[gather] = max(sent), whole
            assert {held.local.dtype for held in engine._held} == {torch.float32}
    # A weight of 8 by 8 and a bias of 8: two of each in what stays, the stem and the head, and one in the block.
    assert found["fp32"] == (2 * (64 + 8) * 4, [3 * (64 + 8) * 4])
    # Biases stay float32.
    assert found["low"] == (2 * (64 * 2 + 8 * 4), [3 * (64 * 2 + 8 * 4)])


class _Watched:
    def __init__(self, own: Any, sent: list[int]) -> None:
        self.own, self.sent, self.allocate = own, sent, own.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **settings: Any) -> Any:
        self.sent.append(output_tensor.nbytes)
        return self.own(output_tensor=output_tensor, input_tensor=input_tensor, **settings)


@check
def no_weight_of_a_block_waits_for_the_backward(rank: int, folder: Path) -> None:
    kept = {}
    for gather in ("fp32", "low"):
        model = Stack()
        with prepare(model, sgd(model), gather, options={"reshard_after_forward": True}) as session:
            saved = []

            def pack(value: Tensor, saved: Any = saved) -> Tensor:
                if value.shape == (8, 8) and value.dtype is torch.bfloat16:
                    saved.append(value.untyped_storage())
                return value

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
                loss = session.model(batch(0, rank)).square().mean()
            kept[gather] = sum(storage.nbytes() for storage in saved)
            step(session, loss)
    # Autocast keeps a copy of each weight that a gradient goes through: of three blocks and the head.
    assert kept == {"fp32": 4 * 64 * 2, "low": 0}


# Numbers.


@check
def linear_layers_train_as_under_autocast_to_the_last_bit(rank: int, folder: Path) -> None:
    for precision in DTYPES:
        for build in (mlp, Stack):
            found = []
            for gather, offload in (("fp32", "none"), ("low", "none"), ("low", "cpu")):
                model = build()
                fields: dict[str, Any] = {"precision": precision, "max_grad_norm": 0.1, "accumulate": 2}
                with prepare(model, adamw(model), gather, **fields, options={"offload": offload}) as session:
                    weights = train(session, steps=3)
                    assert session.skipped_steps == 0
                    with session.evaluate():
                        weights["out"] = session.model(batch(7, 7))
                    weights["norm"] = torch.tensor(session.grad_norm)
                    found.append(weights)
            assert_close(found[1], found[0], 0)
            assert_close(found[2], found[0], 0)


@check
def all_but_matrix_products_compute_in_float32_with_rounded_weights(rank: int, folder: Path) -> None:
    uses: dict[str, tuple[Callable[[nn.Parameter, Any], Tensor], float]] = {
        # f = sum of w x with x = 1 + 2^-12, whose gradient is x.
        "mul": (lambda weight, x: (weight * x).sum(), 8 * FINE),
        "transposed": (lambda weight, x: (weight.t() * x).sum(), 8 * FINE),
        "rows": (lambda weight, x: (weight[:, :] * x).sum(), 8 * FINE),
        "listed": (lambda weight, x: (torch.cat([weight, weight]) * x).sum() / 2, 8 * FINE),
        "square": (lambda weight, x: weight.square().sum() * x / 2, 4 * FINE),
    }
    for name, (use, value) in uses.items():
        model = Table(use)
        with prepare(model, sgd(model)) as session:
            loss = session.model(FINE)
            assert loss.dtype is torch.float32
            assert loss.item() == value, name
            session.backward(loss)
            assert_close(session.full_gradients()["weight"], torch.full((2, 4), FINE), 0)
            session.step()


@check
def rows_of_a_table_have_gradients_that_are_summed_in_float32(rank: int, folder: Path) -> None:
    # bf16 counts to 256.
    ids = torch.tensor([1] * 257 + [0, 2])
    for settings in ({}, {"padding_idx": -2}, {"padding_idx": 2, "scale_grad_by_freq": True}, {"sparse": True}):
        model, reference = nn.Embedding(4, 4, **settings), nn.Embedding(4, 4, **settings)
        nn.init.constant_(model.weight, FINE)
        reference(ids).sum().backward()
        wanted: Any = reference.weight.grad
        with prepare(model, sgd(model)) as session:
            with mock.patch.object(Held, "lowered", autospec=True, side_effect=Held.lowered) as lowered:
                out = session.model(ids)
            # No copy of the table, unless its gradient is sparse.
            assert [call.args[1] for call in lowered.mock_calls] == [torch.float32 if "sparse" in settings else None]
            assert out.dtype is torch.float32
            assert torch.equal(out, torch.ones(259, 4))
            session.backward(out.sum())
            assert_close(session.full_gradients()["weight"], wanted.to_dense(), 0)
            session.step()


@check
def a_penalty_outside_of_the_module_is_computed_in_float32(rank: int, folder: Path) -> None:
    # In fp16 the sum of squares would be infinite: 8 times 128^2 is 2^17.
    model = Table(lambda weight, x: (weight * x).sum(), 128.0)
    with prepare(model, sgd(model, lr=2.0**-8), precision="fp16", loss_scale=1.0) as session:
        penalty = model.weight.square().sum()
        assert penalty.item() == 2.0**17
        assert step(session, session.model(0.0) + penalty)
        assert_close(session.full_weights()["weight"], torch.full((2, 4), 127.0), 0)


@check
def updates_too_small_for_low_precision_add_up(rank: int, folder: Path) -> None:
    for precision in DTYPES:
        model = Table(lambda weight, x: (weight * x).sum(), 1.0)
        with prepare(model, sgd(model, lr=2.0**-14), precision=precision, accumulate=2, loss_scale=8.0) as session:
            for micro in range(20):
                step(session, session.model(float(1 + rank + micro % 2)))
            # Ten steps with the mean of 1, 2, 2 and 3.
            assert_close(session.full_weights()["weight"], torch.full((2, 4), 1 - 20 * 2.0**-14), 0)


# The user's parameter.


@check
def the_parameter_is_the_users_own_in_float32_and_hooks_see_all_of_its_gradient(rank: int, folder: Path) -> None:
    model = Stack()
    weight, seen, told = model.blocks[0].linear.weight, [], []
    model.blocks[0].linear.register_forward_pre_hook(
        lambda part, _: seen.append((part.weight is weight, isinstance(part.weight, nn.Parameter), part.weight.dtype))
    )
    with prepare(model, sgd(model)) as session:
        weight.register_hook(lambda gradient: told.append((gradient.dtype, gradient.shape)))
        weight.register_hook(lambda gradient: gradient * 0)
        # Two passes, and one backward.
        step(session, session.model(batch(0, rank)).sum() + session.model(batch(1, rank)).sum())
        assert seen == [(True, True, torch.float32)] * 2
        assert told == [(torch.float32, (8, 8))]
        assert_close(session.full_weights()["blocks.0.linear.weight"], Stack().blocks[0].linear.weight, 0)


@check
def what_is_evaluated_saved_and_given_back_is_float32(rank: int, folder: Path) -> None:
    model = Table(lambda weight, x: (weight * x).sum())
    with prepare(model, sgd(model)) as session:
        for _ in range(2):
            with session.evaluate():
                assert torch.equal(model.weight, torch.full((2, 4), FINE))
                assert type(model.weight) is nn.Parameter
                assert session.model(1.0).item() == 8 * FINE
                assert torch.equal(model.state_dict()["weight"], torch.full((2, 4), FINE))
            assert session.model(1.0).item() == 8.0
        assert torch.equal(session.full_weights()["weight"], torch.full((2, 4), FINE))
        session.save(folder)
    assert torch.equal(model.weight, torch.full((2, 4), FINE))
    assert type(model.weight) is nn.Parameter
    other = Table(lambda weight, x: (weight * x).sum(), 0.0)
    with prepare(other, sgd(other)) as session:
        session.load(folder)
        assert torch.equal(session.full_weights()["weight"], torch.full((2, 4), FINE))
        other.load_state_dict({"weight": torch.full((2, 4), 3 * FINE)})
        assert torch.equal(session.full_weights()["weight"], torch.full((2, 4), 3 * FINE))


@check
def an_evaluation_between_forward_and_backward_changes_nothing(rank: int, folder: Path) -> None:
    found = []
    for looks in (False, True):
        model = Stack()
        with prepare(model, sgd(model)) as session:
            loss = session.model(batch(0, rank)).square().mean()
            if looks:
                with session.evaluate():
                    session.model(batch(5, rank))
                    with torch.enable_grad():
                        late = session.model(batch(6, rank)).sum()
                # What was computed with the exact weights goes back through them.
                assert all(value.isfinite().all() for value in torch.autograd.grad(late, model.head.bias))
            step(session, loss)
            found.append(session.full_weights())
    assert_close(found[1], found[0], 0)


@check
def what_needs_the_memory_of_a_parameter_or_writes_into_it_is_refused(rank: int, folder: Path) -> None:
    def writes(weight: nn.Parameter, x: Any) -> Tensor:
        with torch.no_grad():
            weight.mul_(0.5)
        return weight.sum()

    looks: list[tuple[Callable[[nn.Parameter, Any], Tensor], str]] = [
        (writes, "what mul_ would write"),
        (lambda weight, x: torch.zeros(()) + weight.data_ptr(), "use gather=fp32"),
        (
            lambda weight, x: nn.functional.embedding(torch.tensor([0]), weight, max_norm=1.0).sum(),
            "embedding with max_norm would write",
        ),
    ]
    for use, words in looks:
        model = Table(use)
        with prepare(model, sgd(model)) as session:
            with pytest.raises(UnsupportedError, match=words):
                session.model(1.0)
            model.use = lambda weight, x: weight.sum()
            assert step(session, session.model(1.0))


@check
def it_is_refused_where_there_is_no_low_precision(rank: int, folder: Path) -> None:
    model = mlp()
    for optimizer in (sgd(model), None):
        with pytest.raises(StrategyError, match=r"'low'.*fp32: add precision=bf16"):
            shardkit.prepare(model, optimizer, "fsdp:gather=low")
    assert_close(dict(model.state_dict()), dict(mlp().state_dict()), 0)


@cache
def found(folder: Path) -> list[dict[str, str]]:
    return run(_run_checks, list(CHECKS), folder, processes=2, timeout=200)


def _run_checks(names: list[str], folder: Path) -> dict[str, str]:
    failures = {}
    for name in names:
        try:
            CHECKS[name](int(os.environ["RANK"]), folder / name)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("low")


@pytest.mark.parametrize("name", CHECKS)
def test_fsdp_in_low_precision(name: str, folder: Path) -> None:
    for rank, failures in enumerate(found(folder)):
        assert name not in failures, f"rank {rank}:\n{failures[name]}"


def test_the_cases_of_precision_hold() -> None:
    outcomes = case_outcomes("fsdp:gather=low", "precision")
    assert len(outcomes) > 10
    for name, ranks in outcomes.items():
        # A module whose parameters are in shards can't be copied, whatever it is gathered in.
        wanted = "refused" if name == "a_copy_of_the_module_runs_by_itself" else "right"
        assert [outcome.kind for outcome in ranks] == [wanted] * 2, f"{name}: {ranks}"


def _trains(name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    workload = MODELS[name]
    for seed in range(SEEDS):
        model, losses = workload.build(seed), []
        with prepare(model, adamw(model)) as session:
            for index in range(STEPS):
                losses.append(workload.loss(session.model, workload.part(index, session.rank, 2, 0, 1)))
                step(session, losses[-1])
            found.append(([loss.item() for loss in losses], session.full_weights()))
    return found


@pytest.mark.parametrize("name", ["t5_tiny", pytest.param("gpt2_tiny", marks=pytest.mark.slow)])
def test_a_transformer_is_about_as_far_from_float64_as_in_autocast(name: str) -> None:
    ranks = run(_trains, name, processes=2, timeout=150)
    here, there = [], []
    for seed in range(SEEDS):
        exact, autocast = expected(name, seed)
        here.append(distances(([rank[seed][0] for rank in ranks], ranks[0][seed][1]), exact))
        there.append(distances(autocast, exact))
    for low, plain in zip(zip(*here, strict=True), zip(*there, strict=True), strict=True):
        assert sum(low) <= HALF_WEIGHTS_OVER_AUTOCAST * sum(plain), (here, there)


def test_the_footprint_of_a_gathered_block_is_half() -> None:
    held = told(stack(4), "fsdp:gather=low,precision=bf16")
    assert held.held.parameters == 14 * MIB
    assert held.forward(["stem.weight"]) == 4 * MIB
    assert held.forward(["blocks.0.weight"]) == 8 * MIB
    assert held.held.parameters == (14 + 4 + 8) * MIB
    held.backward(["blocks.0.weight"])
    held.ready("blocks.0.weight", 16 * MIB, last=True)
    # Gradients are float32.
    assert held.held.gradients == 4 * MIB
