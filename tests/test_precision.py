"""Precision on one process; the cases in shardkit/testing/cases run on two under every strategy."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import Strategy
from shardkit._precision import LossScaler, _raised, check_precision
from shardkit.errors import StrategyError, UnsupportedError
from shardkit.testing.cases._models import W, assert_close, batch, mlp, sgd

Named = namedtuple("Named", "hidden note")


def test_the_loss_scale_is_that_of_torchs_grad_scaler() -> None:
    ours, torchs = LossScaler(2.0**10, 3), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    value = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=0.0)
    pattern = [1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]
    for good in pattern:
        torchs.scale(value.sum() * (1.0 if good else float("inf"))).backward()
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
        ours.update(applied=bool(good))
        assert ours.scale == torchs.get_scale()
        assert ours.growth_tracker == torchs._get_growth_tracker()


def test_the_loss_scale_never_falls_below_one() -> None:
    scaler = LossScaler(2.0, 10)
    assert [scaler.update(applied=False) for _ in range(3)] == [True, False, False]
    assert scaler.scale == 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_is_that_of_torchs_own_recipe(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    reference, model = mlp(), mlp()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=precision == "fp16")
    asked = Strategy("ddp", precision=precision, loss_scale=2.0**12, max_grad_norm=0.1)
    with shardkit.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), asked) as session:
        for index in range(4):
            with torch.autocast("cpu", dtype):
                output = reference(batch(index, 0))
            scaler.scale(output.float().square().mean()).backward()
            scaler.unscale_(plain)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            scaler.step(plain)
            scaler.update()
            plain.zero_grad()
            session.backward(session.model(batch(index, 0)).square().mean())
            assert session.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_module_runs_in_the_precision(when: str) -> None:
    module = mlp()
    expected = _outputs_under_autocast(copy.deepcopy(module))
    given: Any = torch.compile(module, backend="eager") if when == "before" else module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with shardkit.prepare(given, sgd(module), Strategy("ddp", precision="bf16")) as session:
            called: Any = session.model
            if when == "after":
                called = torch.compile(session.model, backend="eager")
            elif when == "in place":
                session.model.compile(backend="eager")
            output = called(batch(0, 0))
            assert output.dtype is torch.float32
            assert torch.equal(output, expected)
            session.backward(output.square().mean())
            assert session.step()


def _outputs_under_autocast(module: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = module(batch(0, 0))
    return output.float()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_recomputed_in_the_precision(reentrant: bool) -> None:
    seen = []

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def part(self, x: Tensor) -> Tensor:
            seen.append(self.layer(x).dtype)
            return self.layer(x).square()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = Recomputed()
    strategy = Strategy("ddp", precision="bf16")
    with shardkit.prepare(model, sgd(model), strategy) as session:
        session.backward(session.model(batch(0, 0).requires_grad_()).mean())
        assert session.step()
    assert seen == [torch.bfloat16] * 2


def test_a_module_keeps_its_signature_and_can_be_pickled() -> None:
    model = mlp()
    before = inspect.signature(model.forward)
    with shardkit.prepare(model, sgd(model), Strategy("ddp", precision="bf16")) as session:
        assert inspect.signature(session.model.forward) == before
        assert torch.equal(pickle.loads(pickle.dumps(session.model))[0].weight, model[0].weight)
    assert "forward" not in vars(model)


def test_a_forward_of_the_instances_own_is_kept_and_given_back() -> None:
    model = W(1)
    plain = model.forward
    mine = lambda x: plain(x) * 2  # noqa: E731
    model.forward = mine  # type: ignore[method-assign]
    with shardkit.prepare(model, sgd(model), Strategy("ddp", precision="bf16")) as session:
        session.backward(session.model([1.0]))
        session.step()
    assert model.forward is mine
    assert_close(model.w, [0.8])


def test_a_session_that_only_evaluates_runs_in_the_precision() -> None:
    model = mlp()
    expected = _outputs_under_autocast(model)
    with shardkit.prepare(model, None, Strategy("ddp", precision="bf16")) as session:
        assert torch.equal(session.model(batch(0, 0)), expected)
        with session.evaluate() as module:
            assert torch.equal(module(batch(0, 0)), expected)


def test_outputs_come_back_in_float32_within_any_container() -> None:
    low, whole = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    raised = _raised(OrderedDict(a=[low, (Named(low, "x"), 3)], b=whole), torch.bfloat16)
    assert type(raised) is OrderedDict
    assert raised["a"][0].dtype is raised["a"][1][0].hidden.dtype is torch.float32
    assert type(raised["a"][1][0]) is Named
    assert raised["b"] is whole
    kept = {"a": [whole, None, "text"]}
    assert _raised(kept, torch.bfloat16) is kept


def test_a_device_that_does_not_compute_in_a_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: False)
    with pytest.raises(UnsupportedError, match=r"cpu doesn't compute in torch.float16: use another precision"):
        check_precision(mlp(), "fp16", torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"loss_scale": 0.5}, "at least 1, not 0.5"), ({"loss_scale": float("inf")}, "finite"),
     ({"loss_scale_window": 0}, "at least 1 step, not 0")],
)  # fmt: skip
def test_a_loss_scale_out_of_range_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Strategy("ddp", **fields)
