"""The one place that imports torch's package of distributed optimizers."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # With torch 2.13 the package says at its import that it is itself written with what is deprecated.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
