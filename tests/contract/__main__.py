"""``python -m tests.contract``: runs the cases on shardkit and on the raw libraries, and writes docs/contract.md."""

from __future__ import annotations

import datetime
import difflib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardkit.testing._ahead import WORKERS
from shardkit.testing.cases._table import load_cases
from tests.contract.page import PAGE, PRODUCT, RAW_RUN, read, render
from tests.contract.product import missing_libraries, reason_left_out, run_strategy, strategies
from tests.contract.ranks import KINDS, Outcome, raw_outcomes
from tests.contract.raw import RAW


@click.command()
@click.option("--product", "which", flag_value="product", help="Run the cases on shardkit only (some minutes).")
@click.option(
    "--raw", "which", flag_value="raw", help="Run the cases on the raw libraries only (a quarter of an hour)."
)
@click.option("--render", "which", flag_value="render", help="Run nothing; write the page from the last runs.")
@click.option(
    "--check", "which", flag_value="check", help="Run nothing; exit with 1 if the page is not what it would be."
)
@click.option("--library", "libraries", multiple=True, type=click.Choice(list(RAW)), help="With --raw: only this one.")
def main(which: str | None, libraries: tuple[str, ...]) -> None:
    """Run the cases on shardkit and on the raw libraries, and write docs/contract.md with what came of them."""
    console = Console(stderr=True)
    if which == "check":
        check(console)
        return
    if which != "render" and (missing := missing_libraries()):
        raise click.ClickException(f"the table needs {', '.join(missing)}: pip install -e '.[all,test]'")
    if which in (None, "product"):
        record(PRODUCT, run_product(console))
    if which in (None, "raw"):
        found = run_raw(console, list(libraries or RAW))
        before = read(RAW_RUN)["cells"]
        record(RAW_RUN, {name: found.get(name, before.get(name, {})) for name in RAW})
    PAGE.write_text(render())
    console.print(f"wrote {PAGE}")


def run_product(console: Console) -> dict[str, Any]:
    """Return the cells of every strategy."""
    with progress(console) as bar:
        task = bar.add_task("shardkit", total=len(strategies()))

        def run(strategy: str) -> dict[str, Outcome]:
            cells = run_strategy(strategy)
            bar.advance(task)
            for name, cell in cells.items():
                if cell["kind"] not in ("right", "refused", "left out"):
                    bar.console.print(f"[red]{cell['kind']}[/] {strategy} {name}: {cell['text']}", highlight=False)
            return cells

        return side_by_side(run, strategies())


def run_raw(console: Console, libraries: list[str]) -> dict[str, Any]:
    """Return the cells of these raw libraries."""
    rows = [name for name, case in load_cases().items() if case.raw]
    with progress(console) as bar:
        task = bar.add_task("raw", total=len(rows) * len(libraries))

        def run(library: str) -> dict[str, Outcome]:
            def told(name: str, outcome: Outcome) -> None:
                bar.advance(task)
                if outcome["kind"] != "right":
                    bar.console.print(f"{library}: {name}: {outcome['kind']}: {outcome['text']}", markup=False)

            names = [name for name in rows if reason_left_out(name, RAW[library].like) is None]
            outcomes = raw_outcomes(library, names, told)
            cells = {name: outcomes.get(name) or left_out(name, library) for name in rows}
            add_remedies(library, cells)
            return cells

        return side_by_side(run, libraries)


def side_by_side(run: Callable[[str], dict[str, Outcome]], columns: list[str]) -> dict[str, Any]:
    """Return what running each column gives; a few at a time, since ranks wait for each other a lot."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(columns, pool.map(run, columns), strict=True))


def left_out(name: str, library: str) -> Outcome:
    """Return the cell of a case that isn't run."""
    return {"kind": "left out", "text": str(reason_left_out(name, RAW[library].like))}


def add_remedies(library: str, cells: dict[str, Outcome]) -> None:
    """Add to each cell that isn't right what comes of its case with the library's remedy, under ``remedy``."""
    names = [name for name, cell in cells.items() if cell["kind"] not in ("right", "not offered", "left out")]
    for name, outcome in raw_outcomes(library, names, lambda name, outcome: None, remedy=True).items():
        cells[name]["remedy"] = f"{KINDS[outcome['kind']]}: {outcome['text']}".removesuffix(": ")


def record(path: Path, cells: dict[str, Any]) -> None:
    """Write a run beside the page, with its date and versions."""
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {name: version(name) for name in ("torch", "fairscale", "deepspeed")}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    # A cell a line, so that a change reads well.
    columns = [
        f"{json.dumps(column)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(cell, ensure_ascii=False)}" for name, cell in found.items())
        + "\n}"
        for column, found in cells.items()
    ]
    head = f'{{"date": "{today}", "versions": {json.dumps(versions)}, "cells": {{'
    path.write_text(head + "\n" + ",\n".join(columns) + "\n}}\n")


def check(console: Console) -> None:
    """Exit with 1, and say what differs, unless the page is what it would be."""
    before = PAGE.read_text().splitlines() if PAGE.exists() else []
    changes = list(difflib.unified_diff(before, render().splitlines(), "committed", "rendered", n=0))
    if changes:
        for line in changes[:40]:
            console.print(line[:200], markup=False, highlight=False)
        raise click.ClickException(f"{PAGE} is out of date: run python -m tests.contract")


def progress(console: Console) -> Progress:
    """Return a bar of the house."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
