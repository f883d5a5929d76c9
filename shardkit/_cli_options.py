"""Options that several commands have, in the same words."""

from __future__ import annotations

import click

json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else there.")
processes = click.option(
    "--processes", default=2, show_default=True, type=click.IntRange(1), help="Ranks that train together."
)
accumulate = click.option(
    "--accumulate", default=1, show_default=True, type=click.IntRange(1), help="Micro-batches per step."
)
device = click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]), help="Where to train."
)
strategies = click.option(
    "--strategies",
    multiple=True,
    metavar="A,B",
    help="Strategies, separated by commas; what reads name=value belongs to the strategy before it. May be "
    "repeated.  [default: every variant that is installed]",
)
