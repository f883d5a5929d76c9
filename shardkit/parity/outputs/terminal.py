"""What was found, on a terminal or in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.parity._results import Comparison, Diagnosis, Report
from shardkit.parity.outputs import _tables, _words

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "dim": "dim", "": ""}
_MOST_ROWS = 12
_WIDTH = 60


def show(found: Comparison | Report, console: Console) -> None:
    """Print a comparison, a suite or an upgrade."""
    if isinstance(found, Comparison):
        _show_comparison(found, console)
    elif found.kind == "upgrade":
        _show_upgrade(found, console)
    else:
        _show_suite(found, console)


def _show_comparison(found: Comparison, console: Console) -> None:
    _say(console, f"a: {_words.line(found.a)}\nb: {_words.line(found.b)}", "dim")
    _say(console, _words.verdict(found), _STYLES[_tables.TONES.get(found.verdict, "")] or "bold")
    for told in [*_words.partings(found), _words.ends(found)]:
        if told:
            _say(console, told)
    if found.verdict == "different" and not found.diagnoses:
        _say(console, _words.NO_CAUSE)
    if found.diagnoses:
        _heading(console, "What the numbers say")
        for diagnosis in found.diagnoses:
            _say_diagnosis(console, "", diagnosis)
    print_table(console, _tables.differences(found, ("a", "b"), _MOST_ROWS, _WIDTH))
    growth = _tables.growth(found, ("a", "b"))
    # Of runs that are the same there is nothing to see grow.
    if growth.rows and found.verdict != "identical":
        print_table(console, growth)
        _legend(console, "gap", "round-off", "ULP")


def _show_suite(found: Report, console: Console) -> None:
    _title(found, console)
    for side in found.sides:
        _notes(console, side.notes)
    print_table(console, _tables.suite(found))
    for row in found.rows:
        if _words.reasoned(row):
            _say(console, f"{_words.strategy(row)}: {_words.line(row.reason)}")
    _found(found, console)
    _legend(console, "distance", "baseline", "ULP", "repeatable", *_control(found))
    _summary(found, console)


def _show_upgrade(found: Report, console: Console) -> None:
    _title(found, console)
    print_table(console, _tables.sides(found))
    for name, side in zip(_words.names_of(found), found.sides, strict=False):
        _notes(console, [f"{name}: {note}" for note in side.notes])
    print_table(console, _tables.upgrade(found))
    for row in found.rows:
        told = _words.partings(row.comparison, ("before", "after")) if row.comparison is not None else []
        if told and row.verdict == "different":
            _say(console, " ".join([f"{_words.strategy(row)}:", *told]))
    print_table(console, _tables.changed(found, _MOST_ROWS, _WIDTH))
    _found(found, console)
    _legend(console, "round-off", "ULP", "speed", *_control(found))
    _summary(found, console)


def _title(found: Report, console: Console) -> None:
    _say(console, _words.title(found), "bold")
    if found.settings:
        _say(console, _words.settings(found), "dim")


def _found(found: Report, console: Console) -> None:
    """Print diagnoses and failures."""
    diagnoses = list(_words.diagnoses(found))
    if diagnoses:
        _heading(console, "What the numbers say")
    for name, diagnosis in diagnoses:
        _say_diagnosis(console, name, diagnosis)
    failures = _words.failures(found)
    if failures:
        _heading(console, "What failed")
    for failure in failures:
        _say(console, str(failure), "red")


def _summary(found: Report, console: Console) -> None:
    styles = {0: "bold green", 1: "bold red", 2: "bold red"}
    _say(console, _words.line(found.summary), styles.get(found.exit_code, "bold"))


def _control(found: Report) -> list[str]:
    return ["control"] if any(row.control for row in found.rows) else []


def _legend(console: Console, *names: str) -> None:
    console.print()
    for name in names:
        _say(console, f"{name}: {_words.LEGEND[name]}", "dim")
    console.print()


def _heading(console: Console, text: str) -> None:
    console.print()
    _say(console, text, "bold")


def _notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        _say(console, _words.line(note), "dim")


def _say_diagnosis(console: Console, name: str, diagnosis: Diagnosis) -> None:
    likely = "likely: " if diagnosis.confidence == "likely" else ""
    _say(console, f"{f'{name}: ' if name else ''}{likely}{_words.line(diagnosis.sentence)}")
    numbers = _words.evidence(diagnosis)
    if numbers:
        _say(console, f"    {numbers}", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def print_table(console: Console, table: _tables.Table) -> None:
    """Print a table, unless it has no rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not table.rows:
        return
    found = Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        caption=table.note or None,
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        found.add_column(
            Text(column.name),
            justify="right" if column.number else "left",
            overflow="fold" if column.folds else "ellipsis",
            no_wrap=not column.folds,
            vertical="top",
        )
    for row in table.rows:
        found.add_row(
            *(
                Text(_broken(cell.text, column), style=_STYLES[cell.tone])
                for cell, column in zip(row, table.columns, strict=True)
            )
        )
    console.print()
    console.print(found)


def _broken(text: str, column: _tables.Column) -> str:
    """Return a strategy with its options on lines of their own where it is long: rich would break it within a word."""
    return _words.packed(text, 24) if column.name == "strategy" else text
