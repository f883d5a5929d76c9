"""Every strategy, model, optimizer, accumulation and clipping against one process."""

from __future__ import annotations

from importlib.metadata import entry_points

import shardkit

from . import compare, tolerances
from .cells import Cell, Trace
from .compare import within
from .reference import reference


def test_no_installed_backend_is_left_out() -> None:
    assert set(shardkit.backends()) >= {point.name for point in entry_points(group="shardkit.backends")}


def test_losses_are_those_of_one_process(ranks: list[Trace], cell: Cell, world_size: int) -> None:
    within(tolerances.LOSS, compare.losses(ranks, reference(cell, world_size)))


def test_gradient_norms_are_those_of_one_process(ranks: list[Trace], cell: Cell, world_size: int) -> None:
    within(tolerances.GRAD_NORM, compare.grad_norms(ranks, reference(cell, world_size)))


def test_gradients_are_those_of_one_process(ranks: list[Trace], cell: Cell, world_size: int) -> None:
    within(tolerances.GRADIENT, compare.gradients(ranks, reference(cell, world_size)))


def test_weights_at_the_end_are_those_of_one_process(ranks: list[Trace], cell: Cell, world_size: int) -> None:
    within(tolerances.WEIGHT, compare.weights(ranks, reference(cell, world_size)))


def test_ranks_end_with_the_same_weights_to_the_last_bit(ranks: list[Trace], cell: Cell) -> None:
    for trace in ranks[1:]:
        assert compare.differing_bits(trace.weights, ranks[0].weights) == []
        assert trace.grad_norms == ranks[0].grad_norms
