"""A benchmark as JSON."""

from __future__ import annotations

import dataclasses

from shardkit.bench._results import FORMAT, Bench
from shardkit.tools.report import to_json


def as_json(found: Bench) -> str:
    """Return all that was found as one JSON object, of the names of the dataclasses; what isn't finite is null."""
    return to_json({"format": FORMAT, "kind": "bench", "exit_code": found.exit_code, **dataclasses.asdict(found)})
