"""The server that forks the ranks of a comparison. Light to import: it starts while this process imports torch."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


@cache
def start(workload: str) -> ForkServerContext:
    """Start the server, once, with the imports of this workload; it goes on importing when this returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardkit.tools._preload"])
    # A thread pool made before the fork is dead after it.
    told = {"SHARDKIT_PRELOAD_WORKLOAD": workload, "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return context
