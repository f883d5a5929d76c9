"""What engines share: the look for a gradient that isn't finite."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def all_finite(values: list[Tensor]) -> bool:
    """Return whether no element of these tensors is infinite or NaN. Waits for the device.

    The tensors are of one device, or of several, then slower.
    """
    if not values:
        return True
    found, one = _flags(values[0].device)
    try:
        # One fused pass, the one that torch's own GradScaler makes; a scale of 1 leaves the values as they are.
        torch._amp_foreach_non_finite_check_and_unscale_(values, found, one)
    except RuntimeError:
        # It knows no sparse and no complex tensors, nor several devices, and may have got through some of them.
        found.zero_()
        return all(bool(torch.isfinite(v.coalesce().values() if v.is_sparse else v).all()) for v in values)
    if found.item():
        found.zero_()
        return False
    return True


@cache
def _flags(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a zero, for the pass to set when it finds something, and a one: to make them takes longer than the pass.

    The zero is zero again whenever nobody looks.
    """
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        return torch.zeros(1, device=device), torch.ones(1, device=device)
