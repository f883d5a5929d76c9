"""The table of cases: each a function that runs on two ranks under every strategy, and where it is refused."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import tests.cases
from tests.cases._models import Prepare

Case = Callable[[Prepare, int], None]

_CASES: dict[str, Case] = {}
_REFUSED: dict[str, dict[str, str]] = {}
_LEFT_OUT: dict[str, dict[str, str]] = {}
_NOT_RAW: set[str] = set()


def case(
    refused: Mapping[str, str] | None = None, *, left_out: Mapping[str, str] | None = None, raw: bool = True
) -> Callable[[Case], Case]:
    """Add a case to the table, under its function's name.

    ``refused`` maps patterns of strategies, such as ``"deepspeed:stage=[123]*"``, to words that the error has there on
    every rank, as a regular expression. Everywhere else the case holds. ``left_out`` maps patterns to the reason why
    the case isn't run there, which docs/contract.md tells too. ``raw`` says whether the raw libraries can be asked the
    same: not where the case is that shardkit refuses something.
    """

    def add(function: Case) -> Case:
        assert function.__name__ not in _CASES
        _CASES[function.__name__] = function
        _REFUSED[function.__name__] = dict(refused or {})
        _LEFT_OUT[function.__name__] = dict(left_out or {})
        if not raw:
            _NOT_RAW.add(function.__name__)
        return function

    return add


def refusal(name: str, strategy: str) -> str | None:
    """Return the words with which a strategy refuses a case; None where the case must hold."""
    return _found(_REFUSED[name], name, strategy)


def reason_left_out(name: str, strategy: str) -> str | None:
    """Return why a case isn't run under a strategy; None where it is."""
    return _found(_LEFT_OUT[name], name, strategy)


def _found(patterns: Mapping[str, str], name: str, strategy: str) -> str | None:
    found = [words for pattern, words in patterns.items() if fnmatchcase(strategy, pattern)]
    assert len(found) < 2, f"two patterns for {name} under {strategy}"
    return found[0] if found else None


def asks_raw(name: str) -> bool:
    """Return whether a case can be asked of the raw libraries too."""
    return name not in _NOT_RAW


def load_cases() -> dict[str, Case]:
    """Return the cases of all modules of this package, by name; in the same order whoever imported a module first."""
    for found in pkgutil.iter_modules(tests.cases.__path__):
        if not found.name.startswith(("_", "test_")):
            importlib.import_module(f"tests.cases.{found.name}")
    return dict(sorted(_CASES.items(), key=lambda item: item[1].__module__))
