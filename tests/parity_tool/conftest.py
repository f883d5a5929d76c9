"""The traces, recorded once for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shardkit import testing
from shardkit.parity import Trace

from . import planted, runs

Load = Callable[[str], Trace]


@pytest.fixture(scope="session")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trace of each planted run."""
    folder = tmp_path_factory.mktemp("traces")
    testing.run(runs.record_all, folder, list(planted.ON_TWO.items()), **runs.SETTINGS)
    testing.run(runs.record_all, folder, list(planted.ON_ONE.items()), **runs.SETTINGS | {"processes": 1})
    return folder


@pytest.fixture(scope="session")
def trace(trace_folder: Path) -> Load:
    """Return a function that loads a run's trace."""
    return cache(lambda name: Trace.load(trace_folder / f"{name}.safetensors"))
