"""The table of cases: each a function that runs on two ranks under every strategy."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import shardkit.testing.cases
from shardkit.testing.cases._models import Prepare

Run = Callable[[Prepare, int], None]


@dataclass(frozen=True)
class Case:
    """One case: it holds, or, where ``or_refused``, the backend refuses it with an ``UnsupportedError``.

    ``raw`` says whether a library without shardkit can be asked the same: not where the case is that shardkit refuses
    something, or of what only shardkit has.
    """

    run: Run
    or_refused: bool
    raw: bool

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def topic(self) -> str:
        """The module it stands in, which is a heading of docs/conformance.md."""
        return self.run.__module__.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """The case's name as a sentence, after the number of its public report if it has one."""
        found = re.match(r"(c\d+)_(.*)", self.name)
        number, words = (found[1].upper(), found[2]) if found else ("", self.name)
        text = words.replace("_", " ")
        return f"{number} {text}" if number else text[0].upper() + text[1:]

    @property
    def heading(self) -> str:
        """What the cases of its topic are about."""
        text = (sys.modules[self.run.__module__].__doc__ or self.topic).strip().splitlines()[0]
        return text.partition(". ")[0].rstrip(".")


_CASES: dict[str, Case] = {}


def case(*, or_refused: bool = False, raw: bool = True) -> Callable[[Run], Run]:
    """Add a case to the table, under its function's name. See :class:`Case`."""

    def add(function: Run) -> Run:
        assert function.__name__ not in _CASES
        _CASES[function.__name__] = Case(function, or_refused, raw)
        return function

    return add


def load_cases() -> dict[str, Case]:
    """Return the cases of all modules of this package, by name; in the same order whoever imported a module first."""
    for found in pkgutil.iter_modules(shardkit.testing.cases.__path__):
        if not found.name.startswith("_"):
            importlib.import_module(f"{shardkit.testing.cases.__name__}.{found.name}")
    return dict(sorted(_CASES.items(), key=lambda item: item[1].topic))
