"""fully_shard by itself is right where that is right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from shardkit.testing import run
from tests.plugins.test_controls import RUNS, close, reference, runs, train_all


@cache
def traces(control: str) -> list[Any]:
    return run(train_all, control, "/nowhere", processes=2, timeout=120)


@pytest.mark.parametrize("control", ["fsdp", "fsdp:offload=cpu,wrap=none"])
@runs
def test_the_control_trains_as_one_process_with_plain_torch_does(control: str, given: Any) -> None:
    expected = reference(*given)
    for trace in traces(control):
        found = trace[RUNS.index(given)]
        for kind in ("losses", "norms", "weights", "gradients"):
            close(found[kind], expected[kind])
