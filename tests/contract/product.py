"""What shardkit does in each cell of case and strategy, as the tests of the cases saw it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import shardkit
from tests.cases._table import load_cases, reason_left_out, refusal
from tests.cases.test_cases import case_outcomes

Cells = dict[str, dict[str, str]]
"""By case, ``kind``: right, refused, left out, or what must not be (wrong, error, partial, hang); ``text``: why."""


def strategies() -> list[str]:
    """Return every variant of every declared backend."""
    return [variant.strategy for backend in shardkit.backends().values() for variant in backend.variants]


def missing_libraries() -> list[str]:
    """Return the libraries of declared backends that aren't installed."""
    libraries = [backend.library for backend in shardkit.backends().values() if backend.library]
    return [library for library in libraries if importlib.util.find_spec(library) is None]


def run_strategy(strategy: str, folder: Path) -> Cells:
    """Return the cells of a strategy, by running the cases as the tests do."""
    outcomes: dict[str, list[Any]] = {}
    for module in dict.fromkeys(case.__module__ for case in load_cases().values()):
        outcomes |= case_outcomes(strategy, module, folder)
    return cells(strategy, outcomes)


def cells(strategy: str, outcomes: dict[str, list[Any]]) -> Cells:
    """Return the cells of a strategy, of the outcomes on each rank of those cases that ran."""
    found = {}
    for name in load_cases():
        reason = reason_left_out(name, strategy)
        if reason is None and name not in outcomes:
            continue
        found[name] = _cell(strategy, name, outcomes[name]) if reason is None else {"kind": "left out", "text": reason}
    return found


def _cell(strategy: str, name: str, ranks: list[Any]) -> dict[str, str]:
    if not any(ranks):
        return {"kind": "right", "text": ""}
    texts = [outcome["message"] if outcome else "" for outcome in ranks]
    if refusal(name, strategy) and len(set(texts)) == 1 and ranks[0]["kind"] == "UnsupportedError":
        return {"kind": "refused", "text": texts[0]}
    kinds = [_failure(outcome) if outcome else "right" for outcome in ranks]
    kind = "hang" if "hang" in kinds else kinds[0] if len(set(kinds)) == 1 else "partial"
    if "wrong" in kinds and "error" not in kinds:
        kind = "wrong"
    return {"kind": kind, "text": "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))}


def _failure(outcome: dict[str, str]) -> str:
    if outcome["kind"] == "LaunchError":
        return "hang"
    return "wrong" if outcome["traceback"].strip().splitlines()[-1].startswith("AssertionError") else "error"
