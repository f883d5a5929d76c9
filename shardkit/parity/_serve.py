"""What runs in an environment: ``python -m shardkit.parity._serve`` takes tasks on stdin, answers on stdout.

Both are JSON, a line for each. It forks each run's ranks from a server that has imported torch and the workload once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.tools import _server

if TYPE_CHECKING:
    from shardkit.errors import LaunchError


def main() -> None:
    # What is printed by libraries is none of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        values = json.loads(line)
        # First of all, so that it imports torch and the workload while this process imports torch.
        _server.start(values["work"]["target"])
        answers.write(json.dumps(_answer(values)) + "\n")


def _answer(values: dict[str, Any]) -> dict[str, Any]:
    from shardkit.errors import LaunchError
    from shardkit.parity._trial import run_task
    from shardkit.parity._work import Task, Work
    from shardkit.tools import _ranks
    from shardkit.tools.compare import headline

    task = Task(**{**values, "work": Work(**values["work"])})
    for path in (task.log, task.progress):
        Path(path).write_bytes(b"")
    try:
        told = _ranks.run(
            run_task,
            task,
            processes=task.ranks,
            timeout=task.timeout,
            workload=task.work.target,
            log=Path(task.log),
        )
    except LaunchError as error:
        return {"failure": {"stage": _stage(error), "headline": headline(error), "details": error.traceback or ""}}
    refusal = next((rank.refusal for rank in told if rank.refusal), "")
    if refusal:
        return {"failure": {"stage": "refused", "headline": refusal, "details": ""}}
    return {"told": [dataclasses.asdict(rank) for rank in told]}


def _stage(error: LaunchError) -> str:
    text = error.traceback or ""
    if "did not end within" in str(error):
        return "timeout"
    return "crash" if "Traceback" not in text else "error"


if __name__ == "__main__":
    main()
