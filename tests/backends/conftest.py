"""What of the suites runs by default."""

from __future__ import annotations

import pytest

from shardkit.testing.cases._table import load_cases

_PUBLIC = ("public", "surroundings")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests, of all but the public cases, those strategies whose code others run as well.

    Strategies that offload share that of those without, of which the public cases run the ones that offload most, and
    stages 0 and 1 share that of stage 2 but for when gradients are averaged, which the parity suite tests.
    """
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent.name != "backends":
            continue
        params = getattr(item, "callspec", None) and item.callspec.params
        strategy = params.get("strategy", "") if params else ""
        shares = "offload" in strategy or strategy in ("deepspeed:stage=0", "deepspeed:stage=1")
        public = bool(params) and "case" in params and load_cases()[params["case"]].topic in _PUBLIC
        if shares and not (public and not strategy.endswith("offload_optimizer=cpu")):
            item.add_marker(pytest.mark.slow)
