"""An environment at work: a process of its interpreter that runs one task after another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from shardkit.errors import TraceError
from shardkit.parity._results import Failure
from shardkit.parity._trace import Trace
from shardkit.parity._work import Task, Work

_START_SECONDS = 180
"""What the process may take to import torch and the workload, beside the time of a task, on a busy machine."""

_PRINTED = 6000
"""How many of the last characters that the ranks printed are kept of a run that failed."""


@dataclass(frozen=True)
class Ran:
    """A run that came to its end."""

    trace: Trace
    step_seconds: float
    samples_per_second: float | None
    peak_memory: list[int]


@final
class Runner:
    """Runs tasks with some environment variables set, in one process group, which ends with it."""

    def __init__(self, variables: Mapping[str, str], *, preload: Iterable[str] = ()) -> None:
        # What every rank would import is imported once, in the process that they are forked from. Some libraries call
        # torch.compile when they are used, which imports torch's compiler.
        modules = [*preload, "torch._inductor.compile_fx"] if preload else []
        self._variables = {**variables, "SHARDKIT_PRELOAD_MODULES": ",".join(modules)}
        self._folder = tempfile.TemporaryDirectory(prefix="shardkit-parity-")
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._number = 0

    def run(
        self,
        work: Work,
        kind: Any,
        *,
        timeout: float,
        strategy: str = "",
        control: bool = False,
        any_version: bool = False,
        detail: str = "sketch",
        progress: Callable[[int], None] | None = None,
    ) -> Ran | Failure:
        """Run one task and return what came of it; an answer that doesn't come within the time is a failure."""
        self._number += 1
        place = Path(self._folder.name, str(self._number))
        task = Task(
            work,
            kind,
            trace=f"{place}.trace",
            progress=f"{place}.progress",
            log=f"{place}.log",
            timeout=timeout,
            strategy=strategy,
            control=control,
            any_version=any_version,
            detail=detail,
        )
        start = self._process is None
        if start:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dataclasses.asdict(task)) + "\n")
            self._process.stdin.flush()
        answer = self._answer(task, timeout + (_START_SECONDS if start else 30), progress)
        if isinstance(answer, Failure):
            self._stop()
            return answer
        if "failure" in answer:
            failure = answer["failure"]
            printed = _tail(Path(task.log))
            details = "\n".join(filter(None, [failure["details"], printed and f"printed by the ranks:\n{printed}"]))
            return Failure(failure["stage"], failure["headline"], details)
        told = answer["told"]
        try:
            trace = Trace.load(task.trace)
        except TraceError as error:
            return Failure("error", str(error), _tail(Path(task.log)))
        finally:
            Path(task.trace).unlink(missing_ok=True)
        slowest = max(told, key=lambda rank: rank["step_seconds"])
        memory = [rank["peak_memory"] for rank in told]
        return Ran(trace, slowest["step_seconds"], slowest["samples_per_second"], memory)

    def close(self) -> None:
        """End the process, and all ranks that it started."""
        self._stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._log = Path(self._folder.name, f"server-{self._number}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardkit.parity._serve"],
                env={**os.environ, **self._variables, **self._temporary()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()

    def _temporary(self) -> dict[str, str]:
        """Have what is killed leave its temporary files where they go with the rest.

        A socket among them has no room for a long path.
        """
        folder = self._folder.name
        return {"TMPDIR": folder} if len(folder) < 60 else {}

    def _answer(self, task: Task, timeout: float, progress: Callable[[int], None] | None) -> Any:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        steps = Path(task.progress)
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._answers.get(timeout=0.1)
                if line:
                    return json.loads(line)
                code = self._process.wait()
                death = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return Failure("crash", f"the process that starts the ranks {death}", _tail(self._log))
            if progress is not None and steps.exists():
                progress(steps.stat().st_size)
            if time.monotonic() > deadline:
                told = f"no answer within {timeout:g} s: the process hangs before its ranks start"
                return Failure("timeout", told, _tail(self._log))

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # Of its own session: the server that forks and all ranks are in the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    """Hand over each line, and an empty one at the end."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in process.stdout:
            answers.put(line)
    answers.put("")


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_text(errors="replace")[-_PRINTED:].strip()
