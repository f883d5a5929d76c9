"""A benchmark as CSV, a line for each row."""

from __future__ import annotations

import csv
import io

from shardkit.bench._results import Bench, Row

SPREADS = (
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "evaluation_samples_per_second",
    "speed_ratio",
)


def as_csv(found: Bench) -> str:
    """Return the rows under a line of names; of what was repeated the median, and the quartiles as _low and _high.

    The peak memory is of the rank that took most. An empty field isn't known.
    """
    text = io.StringIO()
    lines = [_line(found, row) for row in found.rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _line(found: Bench, row: Row) -> dict[str, object]:
    line: dict[str, object] = {
        "workload": found.settings["workload"],
        "strategy": row.strategy,
        "precision": row.precision,
        "status": row.status,
        "batch": row.batch,
        "batch_ratio": row.batch_ratio,
        "peak_memory": max(row.peak_memory, default=None),
        "memory_ratio": row.memory_ratio,
        "train_seconds": row.train_seconds,
        "evaluation_seconds": row.evaluation_seconds,
    }
    for name in SPREADS:
        spread = getattr(row, name)
        line[name] = None if spread is None else spread.median
        line[f"{name}_low"] = None if spread is None else spread.low
        line[f"{name}_high"] = None if spread is None else spread.high
    return {**line, "trials": row.trials, "seconds": row.seconds, "note": row.note or row.evaluation_note}
