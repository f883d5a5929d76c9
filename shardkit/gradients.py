"""What engines share: the look for a gradient that isn't finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def all_finite(values: Sequence[Tensor]) -> bool:
    """Return whether no element of these tensors is infinite or NaN. Waits for the device.

    The tensors are of one floating dtype and one device, or of several, then slower.
    """
    if not values:
        return True
    first = values[0]
    if all(v.dtype == first.dtype and v.device == first.device and v.layout == torch.strided for v in values) and (
        first.dtype.is_floating_point
    ):
        found = torch.zeros(1, device=first.device)
        # One fused pass, the one that torch's own GradScaler makes; a scale of 1 leaves the values as they are.
        torch._amp_foreach_non_finite_check_and_unscale_(list(values), found, torch.ones(1, device=first.device))
        return not found.item()
    return all(bool(torch.isfinite(v.coalesce().values() if v.is_sparse else v).all()) for v in values)
