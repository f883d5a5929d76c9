"""Which parameters lie in the same memory."""

from __future__ import annotations

import torch

from shardkit.parameters import sharing


def test_parameters_that_share_memory_are_named() -> None:
    whole = torch.zeros(10)
    assert sharing({"a": whole[:6], "other": torch.zeros(3), "b": whole[5:]}) == ("a", "b")
    assert sharing({"a": whole, "b": whole[2:3], "c": torch.zeros(2)}) == ("a", "b")


def test_parameters_side_by_side_in_one_tensor_share_none() -> None:
    whole = torch.zeros(4, 6)
    assert sharing({"a": whole[:2], "b": whole[2:], "empty": whole[:0]}) is None
    assert sharing({"even": whole[:, ::2], "odd": whole[:, 1::2]}) is None
    assert sharing({}) is None
