"""The one place that imports FairScale."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

try:
    from fairscale.internal.params import Workhandle
except ModuleNotFoundError:  # before 0.4.7
    from fairscale.utils.params import Workhandle

__all__ = ["OSS", "ShardedDataParallel", "Workhandle", "unconfigured_logging"]


@contextmanager
def unconfigured_logging() -> Iterator[None]:
    """Return a context in which FairScale's log records don't configure the user's logging.

    It logs through the functions of the ``logging`` module, which give the root logger a handler where there is none;
    the user's own ``logging.basicConfig`` would then do nothing.
    """
    root = logging.getLogger()
    handler = logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
