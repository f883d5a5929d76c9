"""Tables of the documentation list what there is: errors, fields of a strategy, options of a backend."""

from __future__ import annotations

import dataclasses
import re

import pytest

import shardkit
from shardkit import errors
from tests.docs._blocks import ROOT


def rows(page: str) -> dict[str, list[str]]:
    """Return the rows of a page's tables by the name in their first cell, where it is code."""
    found = {}
    for line in (ROOT / page).read_text().splitlines():
        row = re.fullmatch(r"\| `(\w+)` \|(.*)\|", line)
        if row is not None:
            found[row[1]] = [cell.strip() for cell in row[2].split("|")]
    return found


def shown(value: object) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_of_errors_has_them_all_with_what_else_they_are() -> None:
    table = rows("docs/errors.md")
    tree = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(table) == set(tree) - {"ShardkitError"}
    for name, (also, *_) in table.items():
        bases = [base.__name__ for base in tree[name].__bases__ if base is not errors.ShardkitError]
        assert also == ", ".join(f"`{base}`" for base in bases), name


def test_the_table_of_a_strategy_has_all_fields_and_their_defaults() -> None:
    table = rows("docs/strategies.md")
    assert list(table) == [field.name for field in dataclasses.fields(shardkit.Strategy)]
    strategy = shardkit.Strategy("any")
    for name, (default, *_) in table.items():
        if name != "backend":
            value = getattr(strategy, name)
            assert default == ("{}" if name == "options" else shown(value)), name


@pytest.mark.parametrize("name", ["ddp", "fairscale"])
def test_the_table_of_a_backend_has_all_options_and_their_defaults(name: str) -> None:
    table = rows(f"docs/backends/{name}.md")
    for field in dataclasses.fields(shardkit.backends()[name].options):
        assert field.name in table, f"{name} has an option {field.name} that its page doesn't tell of"
        default = table[field.name][0]
        assert default == (str(field.default).lower() if isinstance(field.default, bool) else shown(field.default))
