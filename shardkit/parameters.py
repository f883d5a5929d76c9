"""What engines share about parameters: which of them lie in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sharing(parameters: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two parameters that share memory, as after ``a.data = b.data``; None without such.

    A backend that moves parameters into memory of its own would untie them. One parameter in several modules is tied
    in a way that all backends keep, and comes here once. Tensors that aren't contiguous share memory where they begin
    at one address.
    """
    spans = sorted(
        (value.data_ptr(), value.data_ptr() + (value.nbytes if value.is_contiguous() else 1), name)
        for name, value in parameters.items()
        if value.numel() > 0
    )
    last, holder = 0, ""
    for first, end, name in spans:
        if first < last:
            return holder, name
        last, holder = max((last, holder), (end, name))
    return None
