"""Optimizers: each class of torch and some of a user's own, against one process on the whole global batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit.errors import UnsupportedError
from shardkit.testing.cases._models import Prepare, W, assert_close, batch, mlp, same_as_alone, sgd, step
from shardkit.testing.cases._table import case

Made = Callable[[Any], torch.optim.Optimizer]


def _loss(model: nn.Module, index: int, part: int) -> Tensor:
    return model(batch(index, part)).square().mean()


def _same(prepare: Prepare, make: Made, label: str, steps: int = 3, tolerance: float = 2e-6, **fields: Any) -> None:
    """Raise, with the label, unless the optimizer trains as in one process."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 6, 4))
        return model, make(model.parameters())

    try:
        same_as_alone(prepare, build, _loss, steps=steps, tolerance=tolerance, **fields)
    except AssertionError as error:
        error.add_note(f"with {label}")
        raise
    except RuntimeError as error:
        raise AssertionError(f"{label}: {error}") from error


def _every(
    prepare: Prepare, kind: type[torch.optim.Optimizer], settings: Iterable[Mapping[str, Any]], **fields: Any
) -> None:
    for chosen in settings:
        _same(prepare, lambda given, chosen=chosen: kind(given, **chosen), f"{kind.__name__} {chosen}", **fields)


def _flavours(base: Mapping[str, Any], extra: Iterable[Mapping[str, Any]], fused: bool = False) -> list[dict[str, Any]]:
    """Return the settings with each implementation that the class has, then with each of the extra settings."""
    kinds: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if fused else [])]
    return [{**base, **kind} for kind in kinds] + [{**base, **more} for more in extra]


@case()
def adam_in_all_flavours_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    base = {"lr": 1e-2, "weight_decay": 0.1}
    extra = [{"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": True}, {"betas": (0.5, 0.9)}]
    extra += [{"amsgrad": True, "fused": True}, {"lr": torch.tensor(1e-2), "foreach": False}]
    _every(prepare, torch.optim.Adam, _flavours(base, extra, fused=True))


@case()
def adamw_in_all_flavours_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    base = {"lr": 1e-2, "weight_decay": 0.3}
    extra = [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-2), "fused": True}]
    _every(prepare, torch.optim.AdamW, _flavours(base, extra, fused=True), max_grad_norm=0.05, accumulate=2)


@case()
def sgd_in_all_flavours_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    base = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    extra = [{"nesterov": True}, {"maximize": True}, {"dampening": 0.5}, {"momentum": 0.0, "weight_decay": 0.0}]
    _every(prepare, torch.optim.SGD, _flavours(base, extra, fused=True), steps=4)


@case()
def adagrad_in_all_flavours_is_that_of_one_process(prepare: Prepare, rank: int) -> None:
    base = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}
    extra = [{"initial_accumulator_value": 0.5}, {"maximize": True}]
    _every(prepare, torch.optim.Adagrad, _flavours(base, extra, fused=True))


@case()
def optimizers_with_two_moments_are_those_of_one_process(prepare: Prepare, rank: int) -> None:
    decayed = {"lr": 1e-2, "weight_decay": 0.1}
    more = [{"maximize": True}, {"decoupled_weight_decay": True}]
    _every(prepare, torch.optim.NAdam, _flavours(decayed, more))
    _every(prepare, torch.optim.RAdam, _flavours({**decayed, "betas": (0.5, 0.6)}, more), steps=4)
    _every(prepare, torch.optim.Adamax, _flavours(decayed, [{"maximize": True}]))
    _every(prepare, torch.optim.Adadelta, _flavours({"lr": 0.5, "weight_decay": 0.1}, [{"maximize": True}]))


@case()
def optimizers_with_other_states_are_those_of_one_process(prepare: Prepare, rank: int) -> None:
    centered = {"lr": 1e-3, "weight_decay": 0.1, "centered": True, "momentum": 0.5}
    _every(prepare, torch.optim.RMSprop, _flavours(centered, [{"maximize": True}, {"centered": False}]))
    averaged = {"lr": 1e-2, "t0": 1, "lambd": 0.1, "weight_decay": 0.1}
    _every(prepare, torch.optim.ASGD, _flavours(averaged, [{"maximize": True}]), steps=4)
    # Rprop steps by the gradient's sign: one that is zero but for round-off would tell the order of a sum.
    _every(prepare, torch.optim.Rprop, _flavours({"lr": 1e-3}, [{"maximize": True}]))


@case(or_refused=True)
def adafactor_is_right_where_it_sees_whole_tensors(prepare: Prepare, rank: int) -> None:
    _every(prepare, torch.optim.Adafactor, [{"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.05, "foreach": True}])


@case(or_refused=True)
def muon_is_right_where_it_sees_whole_tensors(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 6, 4))
        matrices = [value for value in model.parameters() if value.dim() == 2]
        return model, torch.optim.Muon(matrices, lr=0.05)

    # It computes in bfloat16, where round-off of the gradient may show.
    same_as_alone(prepare, build, _loss, tolerance=2e-3)


class Lamb(torch.optim.Optimizer):
    """Adam's direction, scaled by the ratio of a parameter's norm to the direction's."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                first = state.setdefault("first", torch.zeros_like(value)).lerp_(value.grad, 0.1)
                second = state.setdefault("second", torch.zeros_like(value)).lerp_(value.grad.square(), 0.01)
                direction = first / (second.sqrt() + 1e-6)
                value.sub_(direction, alpha=float(group["lr"] * value.norm() / direction.norm()))


@case(or_refused=True)
def a_layer_wise_optimizer_with_state_is_right_where_it_sees_whole_tensors(prepare: Prepare, rank: int) -> None:
    _same(prepare, Lamb, "Lamb")


class Signed(torch.optim.SGD):
    """Steps by the sign of a momentum, element by element, with a setting that its constructor alone knows."""

    def __init__(self, params: Any, lr: float, *, share: float) -> None:
        super().__init__(params, lr=lr)
        self.share = share

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    kept = self.state[value].setdefault("kept", torch.zeros_like(value))
                    kept.mul_(1 - self.share).add_(value.grad, alpha=self.share)
                    value.sub_(group["lr"] * kept / (kept.abs() + 1e-3))
        return loss


@case()
def a_setting_of_the_optimizer_itself_changed_in_mid_run_holds_from_the_next_step(prepare: Prepare, rank: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(sizes=(8, 6, 4))
        return model, Signed(model.parameters(), 0.05, share=0.3)

    def change(model: nn.Module, optimizer: Any, index: int) -> None:
        optimizer.share = 0.3 + 0.2 * index

    same_as_alone(prepare, build, _loss, steps=3, change=change)


@case()
def hooks_on_the_optimizers_step_are_called_once_a_step_on_every_rank(prepare: Prepare, rank: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with prepare(model, optimizer, accumulate=2) as session:
        for index in range(2):
            for micro in range(2):
                step(session, _loss(session.model, index, 2 * micro + rank))
        assert seen == ["before", "after"] * 2


@case()
def an_element_wise_optimizer_with_state_and_a_closure_that_may_be_left_out_is_right(
    prepare: Prepare, rank: int
) -> None:
    _same(prepare, lambda given: Signed(given, 0.05, share=0.3), "Signed")


class Normalized(torch.optim.SGD):
    """Divides all gradients by one norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [value for group in self.param_groups for value in group["params"] if value.grad is not None]
        total = torch.stack([value.grad.norm() for value in held]).norm()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.grad / total)


@case(or_refused=True)
def an_optimizer_that_takes_one_norm_over_all_is_right_where_it_sees_all(prepare: Prepare, rank: int) -> None:
    _same(prepare, lambda given: Normalized(given, lr=0.1), "Normalized")


class Distance(torch.optim.SGD):
    """Learns one step size for all parameters, kept in the group as Prodigy and D-Adaptation keep theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            d, moved = group.setdefault("d", 0.1), 0.0
            for value in group["params"]:
                if value.grad is not None:
                    moved += float(value.grad.square().sum())
                    value.sub_(group["lr"] * d * value.grad)
            group["d"] = max(d, 0.1 + moved)


@case(or_refused=True)
def an_optimizer_that_learns_a_step_size_in_its_group_is_right_where_it_sees_all(prepare: Prepare, rank: int) -> None:
    _same(prepare, lambda given: Distance(given, lr=0.1), "Distance", steps=4)


class Estimate(torch.optim.SGD):
    """Keeps an estimate over all parameters in a tensor of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.estimate = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [value for group in self.param_groups for value in group["params"] if value.grad is not None]
        for value in held:
            self.estimate.add_(value.grad.abs().sum())
        for value in held:
            value.sub_(self.param_groups[0]["lr"] * value.grad / (1 + self.estimate))


@case(or_refused=True)
def an_optimizer_that_keeps_an_estimate_of_its_own_is_right_where_it_sees_all(prepare: Prepare, rank: int) -> None:
    _same(prepare, lambda given: Estimate(given, lr=0.1), "Estimate")


class Noisy(torch.optim.SGD):
    """Adds noise to each step, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * (value.grad + torch.randn_like(value)))


@case(or_refused=True)
def an_optimizer_that_draws_random_numbers_is_refused(prepare: Prepare, rank: int) -> None:
    # Each rank draws from a generator of its own, so that the replicas of the weights would part.
    model = mlp()
    with prepare(model, Noisy(model.parameters(), lr=0.1), seed=1) as session:
        step(session, _loss(session.model, 0, rank))
    pytest.fail("the optimizer was taken")


@case(raw=False)
def an_optimizer_that_must_have_a_closure_is_refused_before_anything_is_built(prepare: Prepare, rank: int) -> None:
    model = mlp()
    with pytest.raises(UnsupportedError, match=r"LBFGS calls the model again .*under no strategy.*torch.optim.AdamW"):
        prepare(model, torch.optim.LBFGS(model.parameters()))
    with prepare(model, sgd(model)) as session:
        assert step(session, _loss(session.model, 0, rank))


@case()
def the_trial_of_an_optimizer_leaves_no_trace(prepare: Prepare, rank: int) -> None:
    class Counting(torch.optim.SGD):
        stepped = 0

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            type(self).stepped += 1
            return super().step(closure)

    model = mlp()
    rate = torch.tensor(0.1)
    optimizer = Counting([{"params": list(model.parameters()), "lr": rate, "history": [1, 2]}], lr=0.1, foreach=False)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with prepare(model, optimizer) as session:
        assert torch.equal(torch.rand(2), expected)
        assert_close(session.full_weights(), before, 0.0)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate == 0.1
        assert optimizer.param_groups[0]["history"] == [1, 2]
        assert not optimizer.state


@case()
def settings_changed_in_mid_run_hold_from_the_next_step_in_every_group(prepare: Prepare, rank: int) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        first, second = optimizer.param_groups
        second["lr"] = 1e-2 / (index + 1)
        if index == 1:
            first["lr"], first["weight_decay"] = torch.tensor(3e-2), 0.5
            second["betas"] = (0.5, 0.9)
        if index == 2:
            first["lr"].mul_(0.5)
            first["betas"], second["eps"] = (0.8, 0.95), 1e-3

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        groups = [{"params": list(part.parameters())} for part in (model[0], model[2])]
        return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)

    same_as_alone(prepare, build, _loss, steps=4, change=change)


@case()
def momentum_and_decay_changed_in_mid_run_hold_from_the_next_step(prepare: Prepare, rank: int) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        first, second = optimizer.param_groups
        first["momentum"], second["weight_decay"] = 0.9 - 0.3 * index, 0.2 * index
        first["nesterov"] = index == 1
        second["maximize"] = index == 2

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        weights, biases = [[p for p in model.parameters() if p.dim() == d] for d in (2, 1)]
        groups = [{"params": weights, "momentum": 0.9}, {"params": [], "lr": 1.0}, {"params": biases}]
        optimizer = torch.optim.SGD([groups[0], groups[2]], lr=0.1)
        return model, optimizer

    same_as_alone(prepare, build, _loss, steps=4, change=change)


@case()
def state_that_an_optimizer_brings_counts_under_every_class(prepare: Prepare, rank: int) -> None:
    makes: list[Made] = [
        lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1, amsgrad=True),
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
        lambda given: torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.3),
    ]
    for make, index in zip(makes, itertools.count(), strict=False):

        def build(make: Made = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = mlp(sizes=(8, 6, 4))
            optimizer = make(model.parameters())
            for step_ in (7, 8):
                optimizer.zero_grad()
                _loss(model, step_, 0).backward()
                optimizer.step()
            return model, optimizer

        try:
            same_as_alone(prepare, build, _loss, steps=2)
        except AssertionError as error:
            raise AssertionError(f"optimizer {index}: {error}") from error


@case(or_refused=True)
def one_parameter_without_elements_beside_others_is_left_alone_by_any_class(prepare: Prepare, rank: int) -> None:
    model = W(1)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)) as session:
        for expected in (0.89, 0.7811):
            step(session, session.model([1.0]) + session.model.empty.sum())
            assert_close(session.full_weights()["w"], [expected], 1e-5)
