"""How far an optimizer looks, tried on a few numbers, and copies of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkit.optimizers import Attributes, reach, twin
from shardkit.testing.cases.optimizers import Distance, Estimate, Lamb, Noisy, Normalized, Signed
from shardkit.testing.cases.surroundings import Lars, SignSGD


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta),
        *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
        *(torch.optim.Rprop, SignSGD),
    ],
)
def test_an_element_wise_optimizer_is_found_to_be_one(kind: Any) -> None:
    found = reach(kind(parameters(), lr=0.1))
    assert (found.unit, found.cause, found.random) == ("element", "", False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_change_nothing_in_it(kind: Any, flag: str) -> None:
    assert reach(kind(parameters(), lr=0.1, **{flag: True})).unit == "element"


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Lars, Lamb])
def test_a_layer_wise_optimizer_needs_whole_parameters(kind: Any) -> None:
    found = reach(kind(parameters(), lr=0.1))
    assert found.unit == "parameter"
    assert "than on the whole tensor" in found.cause


def test_one_that_takes_matrices_only_needs_whole_parameters() -> None:
    found = reach(torch.optim.Muon(parameters()[:1]))
    assert found.unit == "parameter"
    assert "can't step with pieces of a tensor" in found.cause


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(Normalized, "than beside others"), (Distance, "its own 'd'"), (Estimate, "its own 'estimate'")],
)
def test_one_with_a_number_over_all_parameters_needs_the_whole_model(kind: Any, cause: str) -> None:
    found = reach(kind(parameters(), lr=0.1))
    assert found.unit == "model"
    assert cause in found.cause


def test_one_that_cannot_be_tried_is_taken_to_need_the_whole_model() -> None:
    found = reach(torch.optim.LBFGS(parameters()))
    assert found.unit == "model"
    assert "can't be tried" in found.cause


def test_one_for_sparse_gradients_needs_whole_parameters() -> None:
    found = reach(torch.optim.SparseAdam(parameters()))
    assert found.unit == "parameter"
    assert "takes sparse gradients only" in found.cause


def test_the_group_that_looks_farthest_decides() -> None:
    class Half(Normalized):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (super().step if self.param_groups[0]["whole"] else super(Normalized, self).step)(closure)

    first, second = parameters()
    groups = [{"params": [first], "whole": False}, {"params": [second], "whole": True}]
    assert reach(Half(groups, lr=0.1)).unit == "model"
    assert reach(Half(groups[:1], lr=0.1)).unit == "element"


def test_random_numbers_are_noticed_unless_the_optimizer_has_a_generator_of_its_own() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.numbers = torch.Generator().manual_seed(1)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for value in self.param_groups[0]["params"]:
                value.sub_(torch.rand(value.shape, generator=self.numbers))

    assert reach(Noisy(parameters(), lr=0.1)).random
    optimizer = Own(parameters(), lr=0.1)
    before = optimizer.numbers.get_state()
    assert not reach(optimizer).random
    assert torch.equal(optimizer.numbers.get_state(), before)


def test_a_trial_leaves_no_trace_of_numbers_or_state() -> None:
    optimizer = Estimate(parameters(), lr=0.1)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    state = torch.get_rng_state()
    reach(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert optimizer.estimate == 0
    assert optimizer.param_groups[0]["lr"] is rate
    assert not optimizer.state


def test_a_twin_keeps_attributes_and_follows_those_that_are_set_later() -> None:
    optimizer = Signed(parameters(), 0.1, share=0.3)
    other: Any = twin(optimizer, [{**optimizer.param_groups[0], "params": parameters()}])
    attributes = Attributes(optimizer, other)
    assert other.share == 0.3
    other.share = 0.4
    attributes.follow()
    assert other.share == 0.4
    optimizer.share = 0.5
    attributes.follow()
    assert other.share == 0.5
