"""The public cases on every strategy: right, or refused with the same error on every rank."""

from __future__ import annotations

import os
import re
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import LaunchError, ShardkitError
from shardkit.testing import run
from tests.cases._models import Prepare
from tests.cases._table import load_cases, refusal

CASES = load_cases()


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, strategy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The case's value holds under the strategy, or the refusal that the table states."""
    outcomes = _outcomes(strategy, tmp_path_factory.getbasetemp())[name]
    words = refusal(name, strategy)
    if words is None:
        failures = [f"rank {rank}:\n{outcome['traceback']}" for rank, outcome in enumerate(outcomes) if outcome]
        assert not failures, "\n".join(failures)
    else:
        assert all(outcomes), f"expected a refusal ({words!r}), and nothing was raised on some rank: {outcomes}"
        assert {outcome["kind"] for outcome in outcomes} == {"UnsupportedError"}, outcomes[0]["traceback"]
        assert len({outcome["message"] for outcome in outcomes}) == 1
        assert re.search(words, outcomes[0]["message"])
        assert strategy.partition(":")[0] in outcomes[0]["message"]


@cache
def _outcomes(strategy: str, base: Path) -> dict[str, list[Any]]:
    """Return each case's outcome on each rank: None, or what was raised. All cases share one launch if they can."""
    folder = base / "cases" / re.sub(r"\W", "-", strategy)
    try:
        ranks = run(_run_cases, strategy, list(CASES), folder, processes=2, timeout=400)
    except LaunchError:
        # A case ended or stopped the ranks: find out which, each on ranks of its own.
        ranks = [{}, {}]
        for name in CASES:
            try:
                found = run(_run_cases, strategy, [name], folder, processes=2, timeout=60)
            except LaunchError as error:
                lost = {"kind": "LaunchError", "message": str(error), "traceback": str(error)}
                found = [{name: lost}, {name: lost}]
            for rank, outcome in zip(ranks, found, strict=True):
                rank.update(outcome)
    return {name: [rank[name] for rank in ranks] for name in CASES}


def _run_cases(strategy: str, names: list[str], folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    outcomes: dict[str, Any] = {}
    for name in names:
        outcomes[name] = None
        try:
            CASES[name](Prepare(strategy, folder / name), rank)
        except Exception as error:
            told = error.__class__.__name__ if isinstance(error, ShardkitError) else ""
            outcomes[name] = {"kind": told, "message": str(error), "traceback": traceback.format_exc()}
    return outcomes
