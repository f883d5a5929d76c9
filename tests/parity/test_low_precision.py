"""Every strategy in bf16 and fp16: no farther from float64 than plain DDP in the same precision, by a small factor."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import pytest
import torch

from . import compare, tolerances
from .cells import Cell, Trace
from .models import MODELS
from .ranks import Failure, record
from .reference import train
from .roundoff import Distances, exact_module, measured

WORLD_SIZE = 2
CELLS = [Cell(model, "adamw", accumulate=3, clipped=True) for model in MODELS]
PRECISIONS = ("bf16", "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_strategy_is_as_near_to_float64_as_ddp_in_the_same_precision(
    strategy: str, model: str, precision: str
) -> None:
    found, plain = _distance(strategy, precision, model), _distance("ddp", precision, model)
    for what, value in asdict(found).items():
        bound = tolerances.LOW_PRECISION_FACTOR * asdict(plain)[what]
        assert value <= bound, f"{what} is {value:.3g} from float64, and DDP's {asdict(plain)[what]:.3g}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_ddp_computes_in_the_precision_that_was_asked_for(model: str, precision: str) -> None:
    plain, single = _distance("ddp", precision, model), measured(model)
    unit = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]).eps
    # Neither float32 under another name, nor worse than its format explains.
    assert plain.gradient > 20 * single.gradient
    assert plain.loss < unit


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_end_with_the_same_weights_to_the_last_bit(strategy: str, precision: str) -> None:
    for cell in CELLS:
        traces = _traces(strategy, precision, cell.model)
        for trace in traces[1:]:
            assert compare.differing_bits(trace.weights, traces[0].weights) == []


@cache
def _distance(strategy: str, precision: str, model: str) -> Distances:
    cell = next(cell for cell in CELLS if cell.model == model)
    traces, exact = _traces(strategy, precision, model), _exact(cell)
    return Distances(
        compare.worst(compare.losses(traces, exact)).relative,
        compare.worst(compare.grad_norms(traces, exact)).relative,
        compare.worst(compare.gradients(traces, exact)).relative,
        compare.worst(compare.weights(traces, exact)).relative,
    )


@cache
def _exact(cell: Cell) -> Trace:
    module = exact_module(cell.workload.build(0))
    return train(cell, WORLD_SIZE, module, whole_batch=False, dtype=torch.float64)


def _traces(strategy: str, precision: str, model: str) -> list[Trace]:
    outcome = _recorded(strategy, precision)[next(cell for cell in CELLS if cell.model == model)]
    if isinstance(outcome, Failure):
        pytest.fail(outcome.text, pytrace=False)
    return outcome


@cache
def _recorded(strategy: str, precision: str) -> dict[Cell, list[Trace] | Failure]:
    # From a scale that these small models don't overflow at: each run has all its steps.
    separator = "," if ":" in strategy else ":"
    return record(f"{strategy}{separator}precision={precision},loss_scale=1024", WORLD_SIZE, CELLS)
