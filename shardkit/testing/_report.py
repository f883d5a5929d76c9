"""What the suite found of a backend, on a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from shardkit.testing._conformance import Conformance


def show(found: Conformance, console: Console) -> None:
    """Print a row for each strategy, then each failure, and each reason for which something wasn't run."""
    table = Table(title=f"backend {found.backend}, {found.origin}")
    table.add_column("strategy")
    for kind in ("right", "refused", "skipped", "failed"):
        table.add_column(kind, justify="right")
    for strategy in dict.fromkeys(verdict.strategy for verdict in found.verdicts):
        counts = Counter(verdict.kind for verdict in found.verdicts if verdict.strategy == strategy)
        failed = f"[red]{counts['failed']}[/]" if counts["failed"] else "0"
        numbers = [str(counts[kind]) for kind in ("right", "refused", "skipped")]
        table.add_row(strategy or "(what it declares)", *numbers, failed)
    console.print(table)
    for verdict in found.verdicts:
        if verdict.kind == "failed":
            console.print(verdict.text, markup=False, highlight=False, soft_wrap=True)
            console.print()
    reasons = Counter(verdict.text for verdict in found.verdicts if verdict.kind == "skipped")
    for reason, count in reasons.items():
        console.print(f"skipped {count}: {reason}", markup=False, highlight=False, soft_wrap=True)
    words = "right, or refused" if found.passed else f"{found.counts['failed']} of {len(found.verdicts)} failed"
    console.print(f"{words}, in {found.seconds:.0f} s", markup=False, highlight=False)
