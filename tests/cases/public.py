"""The public cases. Each asserts a value worked out by hand or by plain torch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import InputError, MismatchError, NonFiniteError, ShardkitError, StateError, UnsupportedError
from tests.cases._models import (
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
from tests.cases._table import case


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


@case(refused={"fairscale:shard=optimizer": "use_reentrant=False"})
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


@case()
def c53_a_resumed_run_has_the_same_bits(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), max_grad_norm=0.5) as session:
        train(session, steps=2)
        session.save(prepare.folder)
        first = train(session, steps=2, first=2)
    other = mlp(seed=7)
    with prepare(other, torch.optim.AdamW(other.parameters(), lr=0.3), max_grad_norm=0.5) as session:
        session.load(prepare.folder)
        assert session.steps == 2
        assert session.optimizer.param_groups[0]["lr"] == 0.1
        second = train(session, steps=2, first=2)
    assert all(torch.equal(first[name], second[name]) for name in first)


@case()
def c56_interleaved_groups_train_as_in_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 16, 16, 8))
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 3e-3}]
        return model, torch.optim.Adam(groups)

    expected = train_alone(*build(), steps=3, parts=2)
    with prepare(*build()) as session:
        assert_close(train(session, steps=3), expected, 2e-6)


@case()
def c62_keys_are_those_of_the_bare_module(prepare: Prepare, rank: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x).square().mean()

    keys = list(Named().state_dict())
    for compiled in (False, True):
        bare = Named()
        model = torch.compile(bare, backend="eager") if compiled else bare
        with prepare(model, sgd(model)) as session, warnings.catch_warnings():
            if compiled:
                # The compiler remarks on the hooks of a library, and on gradients that it looks at itself.
                warnings.simplefilter("ignore")
            step(session, session.model(batch(0, rank)))
            weights = session.full_weights()
            assert list(weights) == keys
            Named().load_state_dict(weights, strict=True)


@case(raw=False)
def c64_saving_in_mid_window_is_refused(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=4) as session:
        step(session, session.model([1.0]))
        step(session, session.model([1.0]))
        with pytest.raises(StateError, match="mid-window"):
            session.save(prepare.folder)
        step(session, session.model([1.0]))
        assert step(session, session.model([1.0]))
        assert_close(session.full_weights()["w"], [0.9])


@case()
def c66_ranks_may_generate_different_lengths(prepare: Prepare, rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)

    def generate(module: nn.Module, length: int) -> list[Tensor]:
        state, states = torch.ones(4), []
        for _ in range(length):
            state = module(state)
            states.append(state)
        return states

    with prepare(model, sgd(model)) as session:
        length = (2, 5)[rank]
        with session.evaluate() as module:
            found = generate(module, length)
        with torch.no_grad():
            expected = generate(plain, length)
        assert len(found) == length
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert step(session, session.model(torch.ones(4)).sum())


@case()
def c68_averaged_gradients_are_visible_between_backward_and_step(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    with prepare(model, sgd(model)) as session:
        session.backward(session.model(torch.full((2,), rank + 1.0)).sum())
        assert_close(session.full_gradients()["weight"], [[1.5, 1.5]])
        session.step()


@case(raw=False)
def c68_gradients_are_refused_once_the_step_is_done(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    with prepare(model, sgd(model)) as session:
        step(session, session.model(torch.full((2,), rank + 1.0)).sum())
        with pytest.raises(StateError, match="0 of 1 micro-batches"):
            session.full_gradients()


@case()
def c69_a_parameter_without_dimensions_keeps_its_shape(prepare: Prepare, rank: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s, self.w = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))

        def forward(self, x: float) -> Tensor:
            return self.s * self.w.sum() * x

    model = Scaled()
    with prepare(model, sgd(model)) as session:
        step(session, session.model(rank + 1))
        session.save(prepare.folder)
        session.load(prepare.folder)
        weights = session.full_weights()
        assert_close(weights["s"], torch.tensor(1.55))
        assert weights["s"].shape == ()
        assert_close(weights["w"], torch.full((3,), 0.7))


class SignSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.grad.sign())


class Lars(torch.optim.SGD):
    """Scales each parameter's step by the ratio of its own norm to its gradient's: it needs whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.norm() / value.grad.norm() * value.grad)


@case()
def c72_an_element_wise_optimizer_of_the_users_own_is_right(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, SignSGD(model.parameters(), lr=0.1)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.9])


@case(refused={"deepspeed:stage=[123]*": "pieces of parameters, and Lars gives something else on a piece than on the"})
def c72_a_layer_wise_optimizer_sees_whole_tensors(prepare: Prepare, rank: int) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([3.0, 4.0])), "v": nn.Parameter(torch.tensor([6.0, 8.0]))})
    with prepare(model, Lars(model.parameters(), lr=0.1)) as session:
        step(session, session.model["w"].sum() + session.model["v"].sum())
        weights, ratio = session.full_weights(), 5 / 2**0.5
        assert_close(weights["w"], torch.tensor([3.0, 4.0]) - 0.1 * ratio)
        assert_close(weights["v"], torch.tensor([6.0, 8.0]) - 0.2 * ratio)


@case()
def c75_foreach_and_fused_give_the_same_step(prepare: Prepare, rank: int) -> None:
    for flags in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model = W(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **flags)
        with prepare(model, optimizer) as session:
            step(session, session.model([1.0]))
            assert_close(session.full_weights()["w"], [0.89])
            session.save(prepare.folder)
            step(session, session.model([1.0]))
            first = session.full_weights()["w"]
            session.load(prepare.folder)
            step(session, session.model([1.0]))
            assert torch.equal(session.full_weights()["w"], first)


@case()
def c75_an_optimizer_that_fails_in_its_step_fails_on_every_rank(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with pytest.raises((ShardkitError, RuntimeError, AssertionError)):  # noqa: SIM117
        with prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)) as session:
            step(session, session.model([1.0]))


@case(raw=False)
def c76_what_is_prepared_is_not_prepared_again(prepare: Prepare, rank: int) -> None:
    model = W(1)
    optimizer = sgd(model)
    with prepare(model, optimizer) as session:
        for again in (model, session.model, nn.Sequential(model)):
            with pytest.raises(StateError, match="prepared already"):
                prepare(again, sgd(again))
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.85])
    with prepare(model, optimizer) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])


@case()
def c78_two_models_train_side_by_side(prepare: Prepare, rank: int) -> None:
    generator, critic = W(1), W(2)
    with prepare(generator, sgd(generator)) as first, prepare(critic, sgd(critic)) as second:
        step(first, first.model([rank + 1]))
        assert_close(second.full_weights()["w"], [2.0])
        step(second, second.model([rank + 1]))
        assert_close(first.full_weights()["w"], [0.85])
        assert_close(second.full_weights()["w"], [1.85])


@case()
def c79_state_can_be_copied_and_saved(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        train(session, steps=1)
        weights = session.full_weights()
        prepare.folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, prepare.folder / f"weights-{rank}.pt")
        clone = mlp(seed=1)
        clone.load_state_dict(torch.load(prepare.folder / f"weights-{rank}.pt", weights_only=True))
        expected = session.full_weights()
    copied = copy.deepcopy(model)
    assert_close(dict(copied.state_dict()), expected)


@case()
def c85_replicas_start_from_the_weights_and_buffers_of_rank_0(prepare: Prepare, rank: int) -> None:
    model = nn.Sequential(W(1 + rank), nn.BatchNorm1d(1))
    model[1].running_mean.fill_(rank)
    optimizer = sgd(model)
    with prepare(model, optimizer) as session:
        weights = session.full_weights()
        assert_close(weights["0.w"], [1.0])
        assert_close(weights["1.running_mean"], [0.0])


@case()
def grouped_and_frozen_parameters_train_as_in_one_process(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 16, 16, 8))
        model[0].weight.requires_grad_(False)
        decayed = [value for value in model.parameters() if value.dim() > 1]
        plain = [value for value in model.parameters() if value.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    expected = train_alone(*build(), steps=4, parts=2, max_norm=0.05)
    with prepare(*build(), max_grad_norm=0.05) as session:
        assert_close(train(session, steps=4), expected, 2e-6)


@case(raw=False)
def a_gradient_that_is_not_finite_is_refused_on_every_rank(prepare: Prepare, rank: int) -> None:
    for fields in ({}, {"max_grad_norm": 1.0}):
        model = mlp()
        with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **fields) as session:
            before = train(session, steps=1)
            # An infinite gradient on one rank only, under a finite loss.
            parameter = session.model(batch(0, 0)).square().sum()
            loss = torch.where(parameter < 0, parameter, (parameter * 0).sqrt() if rank == 1 else parameter)
            session.backward(loss)
            with pytest.raises(NonFiniteError, match="gradient is not"):
                session.step()
            after = session.full_weights()
            assert all(torch.equal(before[name], after[name]) for name in before)
            train(session, steps=1, first=1)
            assert session.steps == 2
            assert session.skipped_steps == 1


@case(raw=False)
def a_loss_that_is_not_finite_is_skipped_on_every_rank_when_asked(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), on_nonfinite="skip") as session:
        before = train(session, steps=1)
        session.backward(session.model(batch(0, 0)).square().mean() + (float("inf") if rank == 0 else 0.0))
        with pytest.warns(RuntimeWarning, match="rank 0: inf"):
            assert not session.step()
        after = session.full_weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(session, steps=1, first=1)


@case(left_out={"deepspeed:stage=3*": "ranks must run the same modules at stage 3, as its page says"})
def a_loss_on_one_rank_that_depends_on_no_parameter_counts_as_zero(prepare: Prepare, rank: int) -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    with prepare(model, sgd(model)) as session:
        for index, expected in enumerate((0.95, 0.75, 0.45)):
            x = torch.full((1, 3), index + 1.0)
            nothing = torch.zeros((), requires_grad=True) * 1.0
            step(session, nothing if rank == 1 and index == 0 else session.model(x).sum())
            assert_close(session.full_weights()["weight"], torch.full((1, 3), expected))


@case()
def gradients_from_before_prepare_do_not_count(prepare: Prepare, rank: int) -> None:
    model = W(1)
    model([100.0]).backward()
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.85])


@case(raw=False)
def settings_that_part_among_ranks_in_mid_run_are_refused_before_anything_moves(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        session.optimizer.param_groups[0]["lr"] = 0.1 / (rank + 1)
        session.backward(session.model([1.0]))
        with pytest.raises(MismatchError, match=r"group 0 of the optimizer, lr\): rank 0: 0.1; rank 1: 0.05"):
            session.step()
        session.optimizer.param_groups[0]["lr"] = 0.1
        assert session.step()
        assert_close(session.full_weights()["w"], [0.9])


@case()
def a_session_left_by_an_error_on_every_rank_gives_the_module_back(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with pytest.raises(ZeroDivisionError), prepare(model, sgd(model)) as session:  # noqa: PT012
        step(session, session.model([rank + 1]))
        raise ZeroDivisionError
    assert_close(model.state_dict()["w"], [0.85])
    with prepare(model, sgd(model)) as session:
        step(session, session.model([rank + 1]))
        assert_close(session.full_weights()["w"], [0.7])


@case()
def weights_are_whole_within_evaluation_and_never_empty_without_a_word(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with prepare(model, sgd(model)) as session:
        expected = session.full_weights()
        with session.evaluate() as module:
            assert_close(session.full_weights(), expected)
            assert_close(dict(module.state_dict()), expected)
        try:
            assert_close(dict(model.state_dict()), expected)
            assert_close(dict(model[0].state_dict()), {"weight": expected["0.weight"], "bias": expected["0.bias"]})
        except UnsupportedError as error:
            assert "full_weights" in str(error)  # noqa: PT017
