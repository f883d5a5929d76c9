"""docs/contract.md, rendered from the table of cases and the two recorded runs beside it."""

from __future__ import annotations

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

from shardkit.testing.cases._table import load_cases
from tests.contract.product import strategies
from tests.contract.ranks import HANG_SECONDS, KINDS
from tests.contract.raw import RAW

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PRODUCT, RAW_RUN = DOCS / "contract.md", DOCS / "contract.json", DOCS / "contract-raw.json"
COMMAND = "python -m tests.contract"

_TOP = """\
# The contract, case by case

Right, or refused with the same error on every rank; never a silently wrong number, never a hang. Here is that promise,
one row a case, one column a strategy. Most cases come from public bug reports; each compares with a value worked out by
hand, or with plain torch in one process. [Below](#the-raw-libraries), the same cases run on the raw libraries, to show
what they do by themselves.

The tests run every cell of shardkit's tables on two processes (CPU, gloo), and fail if a cell, or a refusal's message,
is not what stands here. The page is not written by hand but by

```bash
{command}
```

[`shardkit/testing/cases`](../shardkit/testing/cases) holds the cases, which are part of the
[suite](writing-a-backend.md) for backends, and [`tests/contract`](../tests/contract) the loops over the raw libraries.
Last run: shardkit on {product_date}, the raw libraries on {raw_date}, with {versions}.

## Counts

{counts}

## shardkit

✓ right · refused <sup>n</sup>: an `UnsupportedError` with message n, the same on both ranks · \N{EN DASH}: left out,
for the reason given.
"""

_RAW = """\
## The raw libraries

The same functions, over the loop that an ordinary user of each library writes after its documentation, at the library's
default settings: they stand in [`tests/contract/raw.py`](../tests/contract/raw.py). So `find_unused_parameters` is off
in DDP, gradients are zeroed with `model.zero_grad()` as FairScale's tutorial does, and DeepSpeed's `gradient_clipping`
is written only where a case asks for clipping, so that it is 1.0 elsewhere. What isn't right is run again with the one
setting that is known to help most, and the note says what came of that.

This is no verdict on the libraries: the cases were chosen for shardkit's promise, some because a library was known to
fail them, and shardkit stands on these libraries.

- ✓: right
- **wrong**: another value, and no error
- error: the library raised it on both ranks
- error on one rank: the other went on, or lost its connection
- **hang**: a rank waits without end (here {seconds} s)
- n/o: not offered, the library has no notion of it
"""


def read(path: Path) -> dict[str, Any]:
    """Return a recorded run."""
    found = json.loads(path.read_text()) if path.exists() else {"date": "never", "versions": {}, "cells": {}}
    assert isinstance(found, dict)
    return found


def gaps(recorded: dict[str, Any], columns: list[str], rows: list[str]) -> list[str]:
    """Return what a recorded run lacks, or has of cases and columns that are no more."""
    told = [f"no column {column!r}" for column in columns if column not in recorded["cells"]]
    told += [f"column {column!r} of what is no more" for column in recorded["cells"] if column not in columns]
    for column, cells in recorded["cells"].items():
        told += [f"{column}: no case {row}" for row in rows if row not in cells]
        told += [f"{column}: case {row} is no more" for row in cells if row not in rows]
    return told


def render() -> str:
    """Return the page."""
    cases, product, raw = load_cases(), read(PRODUCT), read(RAW_RUN)
    columns = strategies()
    groups: dict[str, list[str]] = {}
    for name, case in cases.items():
        groups.setdefault(case.heading, []).append(name)
    parts = [
        _TOP.format(
            command=COMMAND,
            product_date=product["date"],
            raw_date=raw["date"],
            versions=", ".join(f"{name} {version}" for name, version in raw["versions"].items()),
            counts=_counts(product["cells"], raw["cells"], cases=len(cases)),
        )
    ]
    notes = _Notes("refusal")
    for heading, names in groups.items():
        parts.append(f"### {heading}\n")
        table = _header([_strategy_title(column) for column in columns])
        for name in names:
            found = [product["cells"].get(column, {}).get(name) for column in columns]
            table.append(_row(cases[name].sentence, [_cell(cell, notes) for cell in found]))
        parts.append("\n".join(table) + "\n")
    if notes.numbers:
        parts.append(f"### The refusals, and what is left out\n\n{notes.listed()}\n")
    parts.append(_RAW.format(seconds=HANG_SECONDS))
    notes = _Notes("raw")
    for heading, names in groups.items():
        asked = [name for name in names if cases[name].raw]
        if not asked:
            continue
        parts.append(f"### {heading}, raw\n")
        table = _header([_raw_title(library) for library in RAW])
        for name in asked:
            found = [raw["cells"].get(library, {}).get(name) for library in RAW]
            pairs = zip(found, RAW.values(), strict=True)
            table.append(_row(cases[name].sentence, [_cell(cell, notes, raw.words) for cell, raw in pairs]))
        parts.append("\n".join(table) + "\n")
    unasked = [name for name, case in cases.items() if not case.raw]
    parts.append(
        "Not asked, since the case is that shardkit refuses something:\n\n"
        + "\n".join(f"- {cases[name].sentence}" for name in unasked)
        + "\n"
    )
    parts.append(f"### What they gave\n\n{notes.listed()}\n")
    return "\n".join(parts)


class _Notes:
    """Numbered notes, one for each different text."""

    def __init__(self, anchor: str) -> None:
        self.anchor = anchor
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        number = self.numbers.setdefault(text, len(self.numbers) + 1)
        return f"<sup>[{number}](#{self.anchor}-{number})</sup>"

    def listed(self) -> str:
        return "\n".join(
            f'{number}. <a id="{self.anchor}-{number}"></a>{text}' for text, number in self.numbers.items()
        )


_SHORT = {
    "right": "✓",
    "wrong": "**wrong**",
    "partial": "error on one rank",
    "hang": "**hang**",
    "not offered": "n/o",
    "left out": "–",  # noqa: RUF001
}


def _cell(cell: dict[str, str] | None, notes: _Notes, setting: str = "") -> str:
    if cell is None:
        return "?"
    kind, text = _SHORT.get(cell["kind"], cell["kind"]), cell["text"]
    if not text:
        return kind
    told = _code(text) if cell["kind"] in ("error", "partial", "refused") else html.escape(text, quote=False)
    remedy = cell.get("remedy")
    if remedy is not None:
        again = "the same" if remedy.endswith(text) else html.escape(remedy, quote=False)
        told += f"; with `{setting}`: {again}"
    return f"{kind} {notes.mark(told)}"


def _counts(product: dict[str, Any], raw: dict[str, Any], cases: int) -> str:
    rows = {f"**shardkit**, {cases} cases by {len(product)} strategies": product}
    rows |= {f"{library}, raw": {library: raw.get(library, {})} for library in RAW}
    kinds = {"right": "right", "refused": "refused", "left out": "left out", **KINDS}
    helped = "right with [one setting](#the-raw-libraries)"
    table = [f"| | cells | {' | '.join(kinds.values())} | {helped} |", f"|---|{'--:|' * (len(kinds) + 2)}"]
    for title, columns in rows.items():
        found = Counter(cell["kind"] for cells in columns.values() for cell in cells.values())
        numbers = [found.total(), *(found[kind] for kind in kinds)]
        numbers.append(sum(cell.get("remedy") == "right" for cells in columns.values() for cell in cells.values()))
        table.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    return "\n".join(table)


def _header(titles: list[str]) -> list[str]:
    return [f"| | {' | '.join(titles)} |", f"|---|{':-:|' * len(titles)}"]


def _row(sentence: str, texts: list[str]) -> str:
    return f"| {sentence} | {' | '.join(texts)} |"


def _strategy_title(strategy: str) -> str:
    """Return a strategy as a narrow heading: ``deepspeed:stage=1,offload_optimizer=cpu`` in three lines."""
    backend, _, options = strategy.partition(":")
    pairs = [option.partition("=") for option in options.split(",") if option]
    lines = dict.fromkeys(f"{name.partition('_')[0]} {value}" for name, _, value in pairs)
    return "<br>".join([backend, *lines]).replace(" ", "&nbsp;")


def _raw_title(library: str) -> str:
    backend, _, rest = library.partition(" ")
    return f"{backend}<br>{rest}" if rest else backend


def _code(text: str) -> str:
    text = " ".join(text.split())
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{text}{space}{fence}"
