"""What all tests share: the strategies under test."""

from __future__ import annotations

import importlib.util

import pytest

import shardkit
from shardkit import testing
from shardkit.testing import _ahead

_PARITY_RANKS = {
    1: ("ddp", "fairscale", "deepspeed:stage=2"),
    4: ("ddp", "fairscale", "deepspeed:stage=3"),
}
"""By default the parity suite runs all strategies on two ranks, and on more or less those that differ there."""

_PARITY_OFFLOAD = "deepspeed:stage=2,offload_optimizer=cpu"
"""The one strategy with offload that the parity suite runs by default."""


_LIKE_OTHERS = ("deepspeed:stage=0", "deepspeed:stage=1", "fairscale:shard=optimizer", "zero")
"""Under these a load that is refused goes through nothing that it doesn't under the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests what shares its code with others, which show the same."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _has_others_for_it(item):
            item.add_marker(pytest.mark.slow)


def _has_others_for_it(item: pytest.Function) -> bool:
    params = item.callspec.params
    strategies = [str(params[name]) for name in ("strategy", "variant", "sharded", "half") if name in params]
    offloads = [strategy for strategy in strategies if "offload" in strategy]
    folder, module = item.path.parent.name, item.path.stem
    if folder == "parity":
        kept = _PARITY_RANKS.get(params.get("world_size", 2))
        if kept is not None and "cell" in params:
            return not any(strategy in kept for strategy in strategies)
        return bool(offloads) and (module in ("test_low_precision", "test_race") or _PARITY_OFFLOAD not in offloads)
    if folder == "plugins" and (module, "found" in item.fixturenames) == ("test_deepspeed", True):
        return True  # the suite tries the same under every strategy
    if module == "test_misfits" and any(strategy in _LIKE_OTHERS for strategy in strategies):
        return True
    return bool(offloads) and (folder == "checkpoints" or module == "test_sizes")


def pytest_sessionfinish() -> None:
    _ahead.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for ``strategy`` every variant of every declared backend."""
    suite = metafunc.cls is not None and issubclass(metafunc.cls, testing.BackendSuite)
    if "strategy" in metafunc.fixturenames and not suite:
        arms = []
        for backend in shardkit.backends().values():
            missing = backend.library is not None and importlib.util.find_spec(backend.library) is None
            reason = f"{backend.library} is not installed: {backend.install}"
            marks = [pytest.mark.skipif(missing, reason=reason)]
            arms += [
                pytest.param(variant.strategy, marks=marks, id=variant.strategy)
                for variant in backend.variants_on("cpu")
            ]
        metafunc.parametrize("strategy", arms)
