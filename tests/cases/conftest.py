"""What of the cases runs by default."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests, of all but the public cases, those strategies whose code others run as well.

    Strategies that offload share that of their stages, of which the public cases run the one that offloads most, and
    stage 1 shares that of stage 2 but for when gradients are averaged, which the parity suite tests.
    """
    from tests.cases._table import load_cases

    cases = load_cases()
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname == "test_case":
            name, strategy = item.callspec.params["name"], item.callspec.params["strategy"]
            public = cases[name].__module__.endswith(".public")
            shares = "offload" in strategy or strategy == "deepspeed:stage=1"
            if shares and not (public and ("offload_parameters" in strategy or "offload" not in strategy)):
                item.add_marker(pytest.mark.slow)
