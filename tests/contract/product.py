"""What shardkit does in each cell of case and strategy, as the tests of the cases saw it."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import shardkit
import tests.backends
from shardkit import Strategy
from shardkit.testing import BackendSuite
from shardkit.testing._record import Outcome, Outcomes
from shardkit.testing._suite import case_outcomes
from shardkit.testing.cases._table import load_cases

Cells = dict[str, dict[str, str]]
"""By case, ``kind``: right, refused, left out, or what must not be (wrong, error, partial, hang); ``text``: why."""


def strategies() -> list[str]:
    """Return every variant of every declared backend."""
    return [variant.strategy for backend in shardkit.backends().values() for variant in backend.variants_on("cpu")]


def missing_libraries() -> list[str]:
    """Return the libraries of declared backends that aren't installed."""
    libraries = [backend.library for backend in shardkit.backends().values() if backend.library]
    return [library for library in libraries if importlib.util.find_spec(library) is None]


def suites() -> dict[str, type[BackendSuite]]:
    """Return the suite of each backend that has its tests here."""
    found = {}
    for module in pkgutil.iter_modules(tests.backends.__path__):
        names = vars(importlib.import_module(f"tests.backends.{module.name}"))
        for suite in names.values():
            if isinstance(suite, type) and issubclass(suite, BackendSuite) and suite is not BackendSuite:
                found[suite.backend] = suite
    return found


def reason_left_out(name: str, strategy: str) -> str | None:
    """Return why a case isn't run under a strategy; None where it is."""
    return suites()[Strategy.parse(strategy).backend].reason_left_out(name, strategy)


def run_strategy(strategy: str) -> Cells:
    """Return the cells of a strategy, by running the cases as the tests do."""
    outcomes: Outcomes = {}
    left_out = tuple(name for name in load_cases() if reason_left_out(name, strategy) is not None)
    for topic in dict.fromkeys(case.topic for case in load_cases().values()):
        outcomes |= case_outcomes(strategy, topic, left_out)
    return cells(strategy, outcomes)


def cells(strategy: str, outcomes: Outcomes) -> Cells:
    """Return the cells of a strategy, of the outcomes on each rank of those cases that ran."""
    found = {}
    for name in load_cases():
        reason = reason_left_out(name, strategy)
        if reason is None and name not in outcomes:
            continue
        found[name] = _cell(name, outcomes[name]) if reason is None else {"kind": "left out", "text": reason}
    return found


def _cell(name: str, ranks: list[Outcome]) -> dict[str, str]:
    kinds = {outcome.kind for outcome in ranks}
    if kinds == {"right"}:
        return {"kind": "right", "text": ""}
    if kinds == {"skipped"}:
        return {"kind": "left out", "text": ranks[0].message}
    texts = [outcome.message for outcome in ranks]
    if kinds == {"refused"} and len(set(texts)) == 1 and load_cases()[name].or_refused:
        return {"kind": "refused", "text": texts[0]}
    kind = "hang" if "lost" in kinds else "wrong" if len(kinds) == 1 else "partial"
    told = "; ".join(f"rank {rank}: {outcome.told.did or 'right'}" for rank, outcome in enumerate(ranks))
    return {"kind": kind, "text": told}
