"""A pass on the CPU that holds in memory what it would on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class as_on_cuda(TorchFunctionMode):  # noqa: N801 - a context
    """Within this context, dropout keeps a mask of bytes, as it does on a GPU; on the CPU it keeps one of floats."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return function(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
