"""Norms of gradients, and the look for what isn't finite, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardkit.gradients import all_finite, norms, total_norm


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [10, 1000, 2**14, 2**14 + 1, 3_000_000])
def test_a_norm_is_right_to_float32_round_off_at_any_size(size: int) -> None:
    value = normal(size)
    exact = value.double().norm().item()
    assert norms([value, value])[1].item() == pytest.approx(exact, rel=2e-7)
    assert total_norm([value, value]).item() == pytest.approx(2**0.5 * exact, rel=2e-7)


def test_the_norm_of_small_tensors_is_torchs_own_bit_for_bit() -> None:
    values = [normal(7, 3), normal(50), normal(1).squeeze(), normal(0)]
    assert torch.equal(total_norm(values), torch.nn.utils.get_total_norm(values))


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert total_norm([]).item() == 0.0
    assert all_finite([])


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_element_that_is_not_finite_is_found_and_the_next_look_is_clean(wrong: float, dtype: torch.dtype) -> None:
    good, bad = normal(5, dtype=dtype), normal(5, dtype=dtype)
    bad[3] = wrong
    before = bad.clone()
    assert all_finite([good, good])
    assert not all_finite([good, bad])
    assert all_finite([good])
    assert torch.equal(before.nan_to_num(), bad.nan_to_num())


def test_sparse_gradients_and_several_dtypes_are_looked_at() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.0, float("nan")]), (4,), check_invariants=True
    )
    assert not all_finite([sparse])
    assert all_finite([normal(3), normal(3, dtype=torch.float64)])
    assert not all_finite([normal(3), torch.full((3,), float("inf"), dtype=torch.float64)])
