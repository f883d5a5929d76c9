"""Precision: bf16 and fp16 with float32 weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit import Strategy
from shardkit.errors import InputError, NonFiniteError
from shardkit.testing.cases._models import Prepare, Two, W, assert_close, batch, mlp, sgd, step
from shardkit.testing.cases._table import case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Shown(nn.Module):
    """A layer that keeps what it computed in, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.layer(x)
        self.seen.append(hidden.dtype)
        return {"hidden": hidden, "pair": (hidden, "kept"), "none": None, "loss": hidden.square().mean()}


@case(raw=False)
def the_forward_runs_in_low_precision_and_all_else_in_float32(prepare: Prepare, rank: int) -> None:
    for precision, dtype in DTYPES.items():
        model = Shown()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with prepare(model, optimizer, precision=precision, loss_scale=1024) as session:
            out = session.model(batch(0, rank))
            assert model.seen == [dtype]
            assert out["hidden"].dtype is out["pair"][0].dtype is out["loss"].dtype is torch.float32
            assert out["pair"][1] == "kept"
            assert out["none"] is None
            session.backward(out["loss"])
            assert {value.dtype for value in session.full_gradients().values()} == {torch.float32}
            assert session.step()
            weights = session.full_weights()
            assert {value.dtype for value in weights.values()} == {torch.float32}
            # A step of 1e-2 is finer than bf16 could keep on weights near 1.
            with session.autocast():
                assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is dtype
        assert not torch.is_autocast_enabled("cpu")
        assert model(batch(0, rank))["hidden"].dtype is torch.float32


@case()
def updates_too_small_for_half_precision_add_up_in_float32_weights(prepare: Prepare, rank: int) -> None:
    for precision in DTYPES:
        model = W(1)
        with prepare(model, sgd(model, lr=1e-4), precision=precision) as session:
            for _ in range(10):
                step(session, session.model([rank + 1]))
            assert_close(session.full_weights()["w"], [1 - 10 * 1.5e-4])


@case()
def gradients_are_unscaled_before_the_norm_and_the_clip(prepare: Prepare, rank: int) -> None:
    for scale in (1.0, 8.0, 2.0**16):
        model = Two()
        fields: dict[str, Any] = {"precision": "fp16", "loss_scale": scale, "max_grad_norm": 1.0}
        with prepare(model, sgd(model, lr=1.0), **fields) as session:
            session.backward(session.model([0.5, 1.5][rank]))
            gradients = session.full_gradients()
            assert_close([gradients["a"].item(), gradients["b"].item()], [3.0, 4.0])
            assert session.step()
            assert session.grad_norm == pytest.approx(5.0, rel=1e-6)
            weights = session.full_weights()
            assert_close([weights["a"].item(), weights["b"].item()], [-0.6, -0.8])


@case()
def c48_a_step_that_overflows_on_one_rank_is_skipped_on_all_and_no_schedule_advances(
    prepare: Prepare, rank: int
) -> None:
    for place in (0, 1):
        model = W(1)
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
        with prepare(model, optimizer, precision="fp16", loss_scale=2.0**16) as session:
            moved = []
            for update in range(3):
                loss = session.model([1.0])
                # Finite in float32, and infinite once it is scaled.
                session.backward(loss * 1e38 if update == 0 and rank == place else loss)
                moved.append(session.step())
                if moved[-1]:
                    schedule.step()
            assert moved == [False, True, True]
            assert schedule.last_epoch == 2
            assert_close(session.full_weights()["w"], [0.85])


@case(raw=False)
def c48_a_skipped_step_is_told_and_counted(prepare: Prepare, rank: int) -> None:
    for infinite in ("loss", "gradient"):
        model = W(1)
        with prepare(model, sgd(model), precision="fp16", loss_scale=2.0**16) as session:
            assert session.scaler is not None
            for update in range(3):
                loss = session.model([1.0])
                if update == 1 and rank == 1:
                    loss = loss * (1e38 if infinite == "gradient" else float("inf"))
                session.backward(loss)
                if infinite == "loss" and update == 1:
                    with pytest.warns(RuntimeWarning, match="rank 1: inf"):
                        session.step()
                else:
                    session.step()
                assert session.step_was_skipped == (update == 1)
            assert (session.steps, session.skipped_steps) == (2, 1)
            assert session.scaler.scale == 2.0**15
            assert_close(session.full_weights()["w"], [0.8])


@case()
def optimizer_state_and_weights_are_untouched_by_a_skipped_step(prepare: Prepare, rank: int) -> None:
    def run(session: Any, *, overflow: bool) -> dict[str, Tensor]:
        for index in range(4):
            loss = session.model(batch(index, rank)).square().mean()
            if overflow and index == 2:
                before = session.full_weights()
                assert not step(session, loss * (1e38 if rank == 1 else 1.0))
                after = session.full_weights()
                assert all(torch.equal(before[name], after[name]) for name in before)
                loss = session.model(batch(index, rank)).square().mean()
            assert step(session, loss)
        result: dict[str, Tensor] = session.full_weights()
        return result

    found = []
    for overflow in (False, True):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with prepare(model, optimizer, precision="fp16", loss_scale=2.0**16, max_grad_norm=0.5) as session:
            found.append(run(session, overflow=overflow))
    assert_close(found[1], found[0], 1e-4)


@case(raw=False)
def c49_the_scaler_goes_on_where_it_was_saved(prepare: Prepare, rank: int) -> None:
    fields: dict[str, Any] = {"precision": "fp16", "loss_scale": 512.0, "loss_scale_window": 3}

    def losses(session: Any, first: int) -> list[Tensor]:
        found = []
        for index in range(first, first + 3):
            found.append(session.model(batch(index, rank)).square().mean())
            assert step(session, found[-1])
        return [loss.detach() for loss in found]

    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **fields) as session:
        for index in range(4):
            step(session, session.model(batch(index, rank)).square().mean())
        assert (session.scaler.scale, session.scaler.growth_tracker) == (1024.0, 1)
        session.save(prepare.folder)
        first = losses(session, 4)
    other = mlp(seed=3)
    with prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-2), **fields) as session:
        session.load(prepare.folder)
        assert (session.scaler.scale, session.scaler.growth_tracker) == (1024.0, 1)
        assert all(torch.equal(a, b) for a, b in zip(losses(session, 4), first, strict=True))
        assert (session.scaler.scale, session.scaler.growth_tracker) == (2048.0, 1)


@case(raw=False)
def the_loss_scale_follows_overflows_down_and_good_steps_up_on_all_ranks(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), precision="fp16", loss_scale=4.0, loss_scale_window=2) as session:
        scales = []
        for place in (None, None, 0, 1, 1, None, None):
            step(session, session.model([1.0]) * (3e38 if rank == place else 1.0))
            scales.append(session.scaler.scale)
            assert session.gather(torch.tensor([scales[-1]])).tolist() == [scales[-1]] * 2
        assert scales == [4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 2.0]


@case(raw=False)
def an_overflow_that_no_scale_can_cure_is_refused_on_every_rank(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), precision="fp16", loss_scale=1.0) as session:
        session.backward(torch.where(torch.tensor(rank == 1), (session.model([1.0]) - 1).sqrt(), session.model([1.0])))
        with pytest.raises(NonFiniteError, match="loss scale is 1"):
            session.step()
        assert_close(session.full_weights()["w"], [1.0])
        assert step(session, session.model([1.0]))


@case()
def accumulation_in_low_precision_is_the_mean_of_the_window(prepare: Prepare, rank: int) -> None:
    for precision in DTYPES:
        model = W(1)
        with prepare(model, sgd(model), precision=precision, accumulate=3) as session:
            for value in ([1.0, 2.0, 4.5], [3.0, 4.0, 3.5])[rank]:
                step(session, session.model([value]))
            assert_close(session.full_weights()["w"], [0.7])


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    loss: Tensor
    note: str


@case(raw=False)
def outputs_in_float32_keep_their_type(prepare: Prepare, rank: int) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    class Structured(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(4, 1), kind

        def forward(self, x: Tensor) -> Any:
            loss = self.layer(x).sum()
            return self.kind(loss=loss) if self.kind is CausalLMOutput else self.kind(loss=loss, note="kept")

    for kind in (Slotted, CausalLMOutput, dict):
        model = Structured(kind)
        with prepare(model, sgd(model), precision="bf16") as session:
            out = session.model(batch(0, rank, width=4))
            assert type(out) is kind
            loss = out["loss"] if kind is dict else out.loss
            assert loss.dtype is torch.float32
            assert kind is not CausalLMOutput or out["loss"] is loss
            assert step(session, loss)


@case(or_refused=True, raw=False)
def a_copy_of_the_module_runs_by_itself(prepare: Prepare, rank: int) -> None:
    model = Shown()
    with prepare(model, sgd(model), precision="bf16") as session:
        copied = copy.deepcopy(session.model)
        copied.seen.clear()
        with torch.no_grad():
            copied.layer.weight.zero_()
            copied.layer.bias.zero_()
        assert not copied(batch(0, 0))["hidden"].any()
        assert copied.seen == [torch.bfloat16]
        assert session.model(batch(0, 0))["hidden"].any()


@case(raw=False)
def weights_that_are_not_float32_are_refused_in_low_precision(prepare: Prepare, rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = mlp().to(dtype)
        with pytest.raises(InputError, match=r"'0.weight' is .*model.float"):
            prepare(model, sgd(model), precision="bf16")


@case(raw=False)
def the_plain_text_of_a_strategy_asks_for_precision(prepare: Prepare, rank: int) -> None:
    separator = "," if ":" in prepare.text else ":"
    text = f"{prepare.text}{separator}precision=fp16,loss_scale=256,loss_scale_window=7"
    assert Strategy.parse(text).loss_scale == 256
    model = W(1)
    with Prepare(text, prepare.folder)(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert session.scaler.window == 7
        assert_close(session.full_weights()["w"], [0.85])


@case(raw=False)
def gradients_travel_in_float32_in_bf16(prepare: Prepare, rank: int) -> None:
    _average_a_small_gradient(prepare, rank, "bf16")


@case(raw=False)
def gradients_travel_in_float32_in_fp16(prepare: Prepare, rank: int) -> None:
    _average_a_small_gradient(prepare, rank, "fp16")


def _average_a_small_gradient(prepare: Prepare, rank: int, precision: str) -> None:
    model = W(1)
    with prepare(model, sgd(model), precision=precision) as session:
        # In half precision 1 + 2**-14 is 1.
        session.backward(session.model([(1.0 + 2.0**-14, 2.0**-14)[rank]]))
        assert session.full_gradients()["w"].item() == (1.0 + 2.0**-13) / 2
        assert session.step()
