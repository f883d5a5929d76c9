"""What of the cases runs by default."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave strategies that offload to the slow tests, but for stage 3's public cases: they share the stages' code."""
    from tests.cases._table import load_cases

    cases = load_cases()
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname == "test_case":
            name, strategy = item.callspec.params["name"], item.callspec.params["strategy"]
            public = cases[name].__module__.endswith(".public")
            if "offload" in strategy and not (public and "offload_parameters" in strategy):
                item.add_marker(pytest.mark.slow)
