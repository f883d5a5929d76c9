"""A benchmark on a terminal or in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.bench.outputs import _words
from shardkit.parity.outputs.terminal import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from shardkit.bench._results import Bench


def show(found: Bench, console: Console) -> None:
    """Print the table and what there is to say of it."""
    print_table(console, _words.table(found))
    for line in (_words.noise(found), *_words.notes(found)):
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    console.print(_words.machine(found), style="dim", markup=False, highlight=False, soft_wrap=True)
