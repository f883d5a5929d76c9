"""What all tests share: the strategies under test."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import shardkit
from tests import _ahead


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave strategies that offload to the slow tests where others show the same: they share the stages' code."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            params = item.callspec.params
            strategies = [params.get(name, "") for name in ("strategy", "variant", "sharded", "half")]
            if any("offload" in str(strategy) for strategy in strategies) and _has_others_for_it(item, params):
                item.add_marker(pytest.mark.slow)


def _has_others_for_it(item: pytest.Function, params: dict[str, Any]) -> bool:
    folder, module = item.path.parent.name, item.path.stem
    if folder == "parity":
        return module in ("test_low_precision", "test_race") or params.get("world_size", 2) != 2
    return folder == "checkpoints" or module == "test_sizes"


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
