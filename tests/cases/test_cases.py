"""The public cases on every strategy: right, or refused with the same error on every rank."""

from __future__ import annotations

import gc
import os
import re
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import LaunchError, ShardkitError
from shardkit.testing import run
from tests import _ahead
from tests.cases._models import Prepare
from tests.cases._table import load_cases, reason_left_out, refusal

CASES = load_cases()

SEEN: dict[str, dict[str, list[Any]]] = {}
"""What the cases came to in this process so far, by strategy: for the check that docs/contract.md says the same."""


@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str, strategy: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    """The case's value holds under the strategy, or the refusal that the table states."""
    reason = reason_left_out(name, strategy)
    if reason is not None:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    asked = _ahead.selected(request.session, request.function, "strategy", "name")
    wanted = dict.fromkeys((other, CASES[case].__module__, base) for other, case in asked)
    outcomes = _ahead.result((strategy, CASES[name].__module__, base), wanted, case_outcomes)[name]
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
def case_outcomes(strategy: str, module: str, base: Path) -> dict[str, list[Any]]:
    """Return each outcome of a module's cases on each rank: None, or what was raised. They share a launch."""
    folder = base / "cases" / re.sub(r"\W", "-", strategy)
    names = [
        name
        for name, function in CASES.items()
        if function.__module__ == module and reason_left_out(name, strategy) is None
    ]
    try:
        ranks = run(_run_cases, strategy, names, folder, processes=2, timeout=400)
    except LaunchError:
        # A case ended or stopped the ranks: find out which, each on ranks of its own.
        ranks = [{}, {}]
        for name in names:
            try:
                found = run(_run_cases, strategy, [name], folder, processes=2, timeout=60)
            except LaunchError as error:
                lost = {"kind": "LaunchError", "message": str(error), "traceback": str(error)}
                found = [{name: lost}, {name: lost}]
            for rank, outcome in zip(ranks, found, strict=True):
                rank.update(outcome)
    outcomes = {name: [rank[name] for rank in ranks] for name in names}
    SEEN.setdefault(strategy, {}).update(outcomes)
    return outcomes


def _run_cases(strategy: str, names: list[str], folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    outcomes: dict[str, Any] = {}
    for name in names:
        outcomes[name] = None
        # A library that collects garbage at each start need not walk through what earlier cases left to keep.
        gc.collect()
        gc.freeze()
        try:
            CASES[name](Prepare(strategy, folder / name), rank)
        except (Exception, pytest.fail.Exception) as error:
            told = error.__class__.__name__ if isinstance(error, ShardkitError) else ""
            outcomes[name] = {"kind": told, "message": str(error), "traceback": traceback.format_exc()}
    return outcomes
