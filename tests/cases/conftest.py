"""What of the cases runs by default."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those strategies that offload to the slow tests, but for the public cases: they share the stages' code."""
    from tests.cases._table import load_cases

    cases = load_cases()
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname == "test_case":
            name, strategy = item.callspec.params["name"], item.callspec.params["strategy"]
            if "offload" in strategy and not cases[name].__module__.endswith(".public"):
                item.add_marker(pytest.mark.slow)
