"""State in mid-run: weights loaded and written, buffers, moving averages."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardkit
from shardkit.errors import InputError, MismatchError, UnsupportedError
from shardkit.testing.cases._models import (
    Prepare,
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
    train,
)
from shardkit.testing.cases._table import case


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


@case(or_refused=True)
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

    try:
        same_as_alone(prepare, build, mean_square, steps=4, change=change)
    except RuntimeError:
        # Torch's own: a shard has another shape than the whole that is written.
        assert "parameters" in prepare.shards


@case(raw=False)
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


@case(or_refused=True)
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
    refusal = ""
    try:
        with prepare(model, sgd(model)) as session:
            step(session, session.model([1.0]))
    except UnsupportedError as error:
        refusal = str(error)
    if not refusal:
        return
    assert_close(model.w.detach().float(), [1.0])
    # It says who can, and there it trains.
    other = next(name for name in shardkit.backends() if re.search(rf"\b{name}\b", refusal.partition(":")[2]))
    with Prepare(other, prepare.folder)(model, sgd(model)) as session:
        step(session, session.model([1.0]))
        assert_close(session.full_weights()["w"].float(), [0.9], 1e-2)
