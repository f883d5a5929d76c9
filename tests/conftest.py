"""What all tests share: the strategies under test."""

from __future__ import annotations

import importlib.util

import pytest

import shardkit
from tests import _ahead


def pytest_sessionfinish() -> None:
    _ahead.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for ``strategy`` every variant of every declared backend."""
    if "strategy" in metafunc.fixturenames:
        arms = []
        for backend in shardkit.backends().values():
            missing = backend.library is not None and importlib.util.find_spec(backend.library) is None
            reason = f"{backend.library} is not installed: {backend.install}"
            marks = [pytest.mark.skipif(missing, reason=reason)]
            arms += [pytest.param(variant.strategy, marks=marks, id=variant.strategy) for variant in backend.variants]
        metafunc.parametrize("strategy", arms)
