"""What was found, as JSON."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Mapping
from typing import Any

from shardkit.parity._bisect import Bisection
from shardkit.parity._results import Comparison, Report
from shardkit.parity._trace import Trace
from shardkit.parity.outputs import _words
from shardkit.tools.report import to_json

FORMAT = 1
"""Rises when a name is taken away or means something else; names are added without it."""


def as_json(found: Comparison | Report | Bisection) -> str:
    """Return all that was found as one JSON object, but for the traces; a number that isn't finite is null.

    Its ``kind`` is ``"comparison"``, ``"run"``, ``"upgrade"`` or ``"bisect"``; the other names are those of the
    dataclasses in ``shardkit.parity``. A comparison has its ``exit_code`` and its verdict in words, ``summary``,
    wherever it stands.
    """
    body: dict[str, Any] = _plain(found)
    return to_json({"format": FORMAT, "kind": "comparison", **body})


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if dataclasses.is_dataclass(value):
        fields = [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value)]
        found = {name: _plain(held) for name, held in fields if name != "trace" and not isinstance(held, Trace)}
        if isinstance(value, Comparison):
            found |= {"exit_code": value.exit_code, "summary": _words.verdict(value)}
        return found
    if isinstance(value, Mapping):
        return {str(name): _plain(held) for name, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(held) for held in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    return str(value)
