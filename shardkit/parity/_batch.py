"""Fingerprints of batches: the same for the same samples, however they are cut into micro-batches and ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardkit.workloads._contract import tensors

_MOST = 2**16
"""How many elements of a sample count; of a longer one, as many evenly spaced."""


def fingerprint(batch: Any) -> int:
    """Return a fingerprint of a batch: 64 bits, the sum over its samples of a hash of each, modulo 2**64.

    A sample is what the batch's tensors have at one place of their first dimension; a batch whose tensors have
    different first dimensions is one sample. Numbers and strings beside the tensors don't count.
    """
    held = [value.detach() for value in tensors(batch) if value.numel()]
    if not held:
        return 0
    lengths = {value.shape[0] if value.dim() else 0 for value in held}
    rows = lengths.pop() if len(lengths) == 1 and 0 not in lengths else 1
    total = torch.zeros(rows, dtype=torch.int64, device=held[0].device)
    for place, value in enumerate(held):
        total = _mixed(total * _ODD + place + _hashes(value.reshape(rows, -1)).to(total.device))
    return int(total.sum())


# Odd constants of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as signed.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _hashes(rows: Tensor) -> Tensor:
    """Return a hash of each row: of its elements, as integers or as the bits of float32, times random numbers."""
    if rows.shape[1] > _MOST:
        rows = rows[:, :: -(-rows.shape[1] // _MOST)]
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    whole = rows.float().view(torch.int32).long() if rows.is_floating_point() else rows.long()
    return (_mixed(whole) * _coefficients(whole.shape[1], whole.device)).sum(1)


def _mixed(value: Tensor) -> Tensor:
    # The shift of torch keeps the sign; for a hash that is as good.
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


@cache
def _coefficients(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20210119)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64).to(device) | 1
