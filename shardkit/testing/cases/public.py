"""The public cases. Each asserts a value worked out by hand or by plain torch."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import InputError, StateError
from shardkit.testing.cases._models import (
    Prepare,
    Two,
    W,
    assert_close,
    batch,
    mlp,
    sgd,
    step,
    train,
    train_alone,
)
from shardkit.testing.cases._table import case


@case()
def c01_gradients_are_averaged_and_not_summed(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        assert step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.85])


@case()
def c02_an_accumulated_window_is_the_mean_of_its_micro_batches(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=2) as session:
        assert not step(session, session.model([[1.0], [2.0]][rank]))
        assert step(session, session.model([[3.0], [4.0]][rank]))
        assert_close(session.full_weights()["w"], [0.75])


@case()
def c02_ten_accumulated_steps_of_adam_are_those_of_one_process(prepare: Prepare, rank: int) -> None:
    reference, model = mlp(), mlp()
    expected = train_alone(reference, torch.optim.Adam(reference.parameters(), lr=1e-2), steps=10, parts=8)
    with prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), accumulate=4) as session:
        assert_close(train(session, steps=10), expected, 2e-6)


@case()
def c04_every_backward_of_a_window_counts(prepare: Prepare, rank: int) -> None:
    for count in (1, 2, 4):
        reference, model = mlp(), mlp()
        expected = train_alone(reference, torch.optim.Adam(reference.parameters(), lr=1e-2), steps=5, parts=2 * count)
        with prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), accumulate=count) as session:
            assert_close(train(session, steps=5), expected, 2e-6)


@case()
def c06_ranks_hold_the_same_weights_after_an_accumulated_step(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=2) as session:
        for value in ([1.0, 3.0], [2.0, 4.0])[rank]:
            step(session, session.model([value]))
        weight = session.full_weights()["w"]
        others = [torch.empty(1), torch.empty(1)]
        dist.all_gather(others, weight)
        assert torch.equal(others[0], others[1])
        assert_close(weight, [0.75])


@case()
def c10_the_gradient_norm_is_global_and_before_clipping(prepare: Prepare, rank: int) -> None:
    for fields in ({"track_grad_norm": True}, {"max_grad_norm": 1.0}, {"max_grad_norm": 100.0}):
        model = Two()
        with prepare(model, sgd(model), **fields) as session:
            step(session, session.model([0.5, 1.5][rank]))
            assert session.grad_norm == pytest.approx(5.0, rel=1e-6)


@case()
def c12_clipping_uses_the_norm_over_all_shards(prepare: Prepare, rank: int) -> None:
    model = Two()
    with prepare(model, sgd(model, lr=1.0), max_grad_norm=1.0) as session:
        step(session, session.model(1.0))
        weights = session.full_weights()
        assert_close([weights["a"].item(), weights["b"].item()], [-0.6, -0.8])


@case()
def c14_clipping_happens_once_a_window(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    with prepare(model, sgd(model, lr=1.0), accumulate=2, max_grad_norm=1.0) as session:
        step(session, session.model(torch.tensor([2.0, 0.0])).sum())
        step(session, session.model(torch.tensor([0.0, 2.0])).sum())
        assert_close(session.full_weights()["weight"], [[-(0.5**0.5), -(0.5**0.5)]])


@case()
def c18_groups_keep_their_own_settings_order_and_extra_keys(prepare: Prepare, rank: int) -> None:
    model = Two(1, 1)
    optimizer = torch.optim.SGD(
        [
            {"params": [model.a], "lr": 0.1, "weight_decay": 0.0, "name": "first"},
            {"params": [model.b], "lr": 0.01, "weight_decay": 0.5, "name": "second", "lr_mult": 2},
        ]
    )
    with prepare(model, optimizer) as session:
        step(session, session.model([0.5, 1.5][rank]))
        weights = session.full_weights()
        assert_close([weights["a"].item(), weights["b"].item()], [0.7, 0.955])
        assert [group["name"] for group in session.optimizer.param_groups] == ["first", "second"]
        assert session.optimizer.param_groups[1]["lr_mult"] == 2


@case()
def c18_a_group_changed_in_mid_run_holds_from_the_next_step(prepare: Prepare, rank: int) -> None:
    reference, model = mlp(), mlp()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with prepare(model, optimizer) as session:
        for index in range(4):
            for group in (*plain.param_groups, *session.optimizer.param_groups):
                group["lr"], group["weight_decay"] = 1e-2 / (index + 1), 0.1 * index
            plain.zero_grad()
            reference(torch.cat([batch(index, 0), batch(index, 1)])).square().mean().backward()
            plain.step()
            train(session, steps=1, first=index)
        assert_close(session.full_weights(), reference.state_dict(), 2e-6)


@case()
def c20_splitting_a_group_changes_nothing(prepare: Prepare, rank: int) -> None:
    results = []
    for count in (1, 2, 8):
        model = mlp(sizes=(8, 16, 16, 16, 8))
        parameters = list(model.parameters())
        groups = [
            {"params": parameters[i * len(parameters) // count : (i + 1) * len(parameters) // count]}
            for i in range(count)
        ]
        with prepare(model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)) as session:
            results.append(train(session, steps=5))
    for result in results[1:]:
        assert_close(result, results[0], 1e-7)


@case()
def c21_a_schedule_advances_once_a_step_built_before_or_after(prepare: Prepare, rank: int) -> None:
    for before in (True, False):
        model = W(1)
        optimizer = sgd(model)
        rate = lambda epoch: 0.5**epoch  # noqa: E731
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate) if before else None
        with prepare(model, optimizer, accumulate=2) as session:
            schedule = schedule or torch.optim.lr_scheduler.LambdaLR(session.optimizer, rate)
            for _ in range(6):
                if step(session, session.model([1.0])):
                    schedule.step()
            assert_close(session.full_weights()["w"], [0.825])
            assert session.optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
            assert schedule.last_epoch == 3


@case()
def c23_the_optimizer_is_one_of_torch_that_any_schedule_accepts(prepare: Prepare, rank: int) -> None:
    from torch.optim import lr_scheduler

    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) as session:
        assert isinstance(session.optimizer, torch.optim.Optimizer)
        train(session, steps=1)
        lr_scheduler.LambdaLR(session.optimizer, lambda epoch: 1.0).step()
        lr_scheduler.ReduceLROnPlateau(session.optimizer).step(1.0)
        lr_scheduler.CosineAnnealingLR(session.optimizer, 10).step()
        cycle = lr_scheduler.OneCycleLR(session.optimizer, max_lr=0.1, total_steps=10)
        train(session, steps=1, first=1)
        cycle.step()


@case(raw=False)
def c25_a_parameter_listed_twice_is_refused(prepare: Prepare, rank: int) -> None:
    model = W(1)
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"].append(model.w)
    with pytest.raises(InputError, match=r"'w' more than once"):
        prepare(model, optimizer)


@case()
def c26_an_empty_group_and_a_rank_that_owns_nothing_are_right(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": []}], lr=0.1)
    with prepare(model, optimizer) as session:
        step(session, session.model(torch.ones(4)).sum())
        assert_close(session.full_weights()["weight"], torch.full((1, 4), 0.9))
    model = W(1)
    with prepare(model, torch.optim.Adam(model.parameters(), lr=0.1)) as session:
        step(session, session.model([1.0]))
        assert_close(session.full_weights()["w"], [0.9])
        session.save(prepare.folder)
        step(session, session.model([1.0]))
        first = session.full_weights()["w"]
        session.load(prepare.folder)
        step(session, session.model([1.0]))
        assert torch.equal(session.full_weights()["w"], first)


@case()
def c31_tied_weights_get_the_whole_gradient_and_stay_tied(prepare: Prepare, rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.enc.weight, 2.0)
            self.dec.weight = self.enc.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.dec(self.enc(x)).sum()

    model = Tied()
    with prepare(model, sgd(model)) as session:
        step(session, session.model(torch.tensor([rank + 1.0])))
        weights = session.full_weights()
        assert_close(weights["enc.weight"], [[1.4]])
        assert_close(weights["dec.weight"], [[1.4]])
        assert session.model.enc.weight is session.model.dec.weight
        session.save(prepare.folder)
        session.load(prepare.folder)
        assert session.model.enc.weight is session.model.dec.weight
        step(session, session.model(torch.tensor([1.0])))
        assert_close(session.full_weights()["enc.weight"], [[1.4 - 0.1 * 2.8]])
    assert model.enc.weight is model.dec.weight


@case()
def c33_a_frozen_module_without_optimizer_evaluates(prepare: Prepare, rank: int) -> None:
    teacher = mlp().requires_grad_(False)
    keys, expected = list(teacher.state_dict()), teacher(batch(0, 0))
    with prepare(teacher, None) as session:
        assert torch.equal(session.model(batch(0, 0)), expected)
        assert list(session.full_weights()) == keys


@case(raw=False)
def c33_a_session_without_optimizer_says_so(prepare: Prepare, rank: int) -> None:
    with (
        prepare(mlp().requires_grad_(False), None) as session,
        pytest.raises(StateError, match="only evaluates"),
    ):
        session.optimizer  # noqa: B018


@case()
def c34_statistics_of_batch_norm_are_those_of_rank_0_everywhere(prepare: Prepare, rank: int) -> None:
    model = nn.BatchNorm1d(1)
    with prepare(model, sgd(model)) as session:
        for _ in range(2):
            step(session, session.model(torch.tensor([[0.0], [2.0]]) + 10 * rank).sum())
        assert_close(session.model.running_mean, [0.19])
        assert_close(session.full_weights()["running_mean"], [0.19])
        with session.evaluate() as module:
            same = torch.tensor([[1.0], [5.0]])
            outputs = [torch.empty(2, 1), torch.empty(2, 1)]
            dist.all_gather(outputs, module(same))
            assert torch.equal(outputs[0], outputs[1])
            assert not module.training
        assert session.model.training


@case()
def c34_buffers_of_the_users_own_modules_are_those_of_rank_0_everywhere(prepare: Prepare, rank: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("running_mean", torch.zeros(1))
            self.register_buffer("running_var", torch.ones(1))
            self.register_buffer("written", torch.zeros(2))
            self.register_buffer("replaced", torch.zeros(()))
            self.register_buffer("constant", torch.arange(3))

        def forward(self, x: Tensor) -> Tensor:
            if rank == 1:
                self.written += 1
            self.replaced = self.replaced + rank + 2
            return nn.functional.batch_norm(x * self.scale, self.running_mean, self.running_var, training=True)

    model = Own()
    with prepare(model, sgd(model)) as session:
        for _ in range(2):
            step(session, session.model(torch.tensor([[0.0], [2.0]]) + 10 * rank).sum())
        weights = session.full_weights()
        assert_close(weights["running_mean"], [0.19])
        assert_close(weights["written"], [0.0, 0.0])
        assert_close(weights["replaced"], 4.0)
        assert_close(weights["constant"], [0, 1, 2])


@case()
def c36_two_forwards_through_batch_norm_make_one_backward(prepare: Prepare, rank: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(module: nn.Module, part: int) -> Tensor:
        return module(batch(0, part, 6, 4)).sum() - 2 * module(batch(1, part, 6, 4)).square().sum()

    reference = build()
    ((loss(reference, 0) + loss(reference, 1)) / 2).backward()
    model = build()
    with prepare(model, sgd(model)) as session:
        session.backward(loss(session.model, rank))
        gradients = session.full_gradients()
        expected = {name: value.grad for name, value in reference.named_parameters()}
        assert_close(gradients, expected, 1e-5)
        assert session.step()


@case()
def c37_several_forwards_make_one_backward(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]) + session.model([10.0 * (rank + 1)]))
        assert_close(session.full_weights()["w"], [-0.65])
    model = W(1)
    with prepare(model, sgd(model)) as session:
        step(session, sum(session.model([rank + 1.0]) for _ in range(40)) / 40)
        assert_close(session.full_weights()["w"], [0.85])


class Pair(NamedTuple):
    loss: Tensor
    note: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Tensor
    note: str


@dataclasses.dataclass
class Plain:
    loss: Tensor
    note: str


class Attributes(collections.OrderedDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


@case()
def c40_outputs_of_any_structure_keep_their_type(prepare: Prepare, rank: int) -> None:
    class Structured(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.used, self.unused, self.kind = W(1), W(1), kind

        def forward(self, x: Any) -> Any:
            loss = self.used(x)
            if self.kind is dict:
                return {"loss": loss, "none": None, "list": [loss.detach(), 3], "note": "kept"}
            return self.kind(loss=loss, note="kept")

    for kind in (Pair, Frozen, Plain, Attributes, dict):
        model = Structured(kind)
        with prepare(model, sgd(model)) as session:
            out = session.model([rank + 1])
            assert type(out) is kind
            assert (out["note"] if kind is dict else out.note) == "kept"
            step(session, out["loss"] if kind is dict else out.loss)
            weights = session.full_weights()
            assert_close(weights["used.w"], [0.85])
            assert_close(weights["unused.w"], [1.0])


@case()
def c41_inputs_of_any_type_reach_the_module_as_they_are(prepare: Prepare, rank: int) -> None:
    marker = object()

    class Anything(W):
        def forward(self, items: Any, mode: str, opt: Any = 1, meta: Any = None) -> Tensor:
            assert opt is None
            assert meta == ("a", 3)
            assert items[0]["o"] is marker
            return super().forward(items[0]["t"]) * (2 if mode == "double" else 1)

    model = Anything(1)
    with prepare(model, sgd(model)) as session:
        step(session, session.model([{"t": [rank + 1], "n": None, "o": marker}], "double", opt=None, meta=("a", 3)))
        assert_close(session.full_weights()["w"], [0.7])


class Checkpointed(nn.Module):
    """A checkpointed layer, and one that isn't used."""

    def __init__(self, reentrant: bool, *, unused: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = W(1), reentrant
        if unused:
            self.unused = W(1)

    def forward(self, x: float) -> Tensor:
        given = torch.tensor([float(x)], requires_grad=self.reentrant)
        result = checkpoint(self.layer, given, use_reentrant=self.reentrant)
        assert isinstance(result, Tensor)
        return result


@case()
def c43_checkpointing_without_reentry_is_right_beside_an_unused_layer(prepare: Prepare, rank: int) -> None:
    model = Checkpointed(reentrant=False, unused=True)
    with prepare(model, sgd(model)) as session:
        for expected in (0.85, 0.7):
            step(session, session.model(rank + 1))
            assert_close(session.full_weights()["layer.w"], [expected])


@case(or_refused=True)
def c43_reentrant_checkpointing_is_right_beside_an_unused_layer(prepare: Prepare, rank: int) -> None:
    model = Checkpointed(reentrant=True, unused=True)
    with prepare(model, sgd(model)) as session:
        for expected in (0.85, 0.7):
            step(session, session.model(rank + 1))
            assert_close(session.full_weights()["layer.w"], [expected])


@case()
def c45_evaluation_between_steps_changes_nothing(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        session.model.eval()
        with torch.no_grad():
            session.model([5.0])
        session.model([7.0])
        session.model.train()
        with session.evaluate() as module:
            assert_close(module([1.0]), 0.85)
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])
