"""The tolerances are round-off as measured, neither tighter nor much looser."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce
from operator import or_

import pytest

from . import tolerances
from .models import MODELS
from .roundoff import measured


def test_no_tolerance_for_losses_is_looser_than_a_millionth() -> None:
    assert tolerances.LOSS <= 1e-6


@pytest.mark.parametrize("quantity", ["loss", "grad_norm", "gradient", "weight"])
def test_a_tolerance_is_two_to_ten_times_the_measured_round_off(quantity: str) -> None:
    largest = asdict(reduce(or_, (measured(model) for model in MODELS)))[quantity]
    tolerance = getattr(tolerances, quantity.upper())
    assert 2 * largest <= tolerance <= 10 * largest
