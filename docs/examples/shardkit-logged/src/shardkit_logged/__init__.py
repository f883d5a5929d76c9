"""Wraps ``shardkit_prepare`` of every backend: times it, logs it, and compiles the module if asked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from shardkit import Engine, Strategy, hookimpl

if TYPE_CHECKING:
    from torch.optim import Optimizer

_logger = logging.getLogger(__name__)


@hookimpl(wrapper=True)
def shardkit_prepare(optimizer: Optimizer | None, strategy: Strategy) -> Generator[None, Engine | None, Engine | None]:
    start = time.perf_counter()
    # The backend, and the wrappers within this one. What it raises comes out here, and goes on if nothing catches it.
    engine = yield
    seconds = time.perf_counter() - start
    what = "nothing" if engine is None else type(engine).__name__
    _logger.info("%s on rank %s: %s in %.3f s", strategy, os.environ.get("RANK", "0"), what, seconds)
    compiler = os.environ.get("SHARDKIT_LOGGED_COMPILE")
    if compiler and engine is not None and optimizer is not None:
        # In place: the session's module stays the user's own.
        engine.model.compile(backend=compiler)
    # Without this the session would get None.
    return engine
