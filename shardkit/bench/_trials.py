"""Trials: each a fresh group of processes that trains a few steps, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, final

from shardkit import errors
from shardkit._sizes import format_bytes
from shardkit._strategy import Strategy
from shardkit.errors import InputError, LaunchError, ShardkitError, TrialError
from shardkit.workloads import _find

if TYPE_CHECKING:
    from shardkit.bench._evaluation import Evaluation
    from shardkit.bench._trial import Files, Record, Task
    from shardkit.workloads import Workload

Outcome = Literal["fits", "out of memory", "refused", "error", "died", "hang"]

_START_SECONDS = 300
"""What the process that forks the ranks may take to import torch and the workload, on a busy machine."""

_GRACE_SECONDS = 5
"""How long the other ranks have, after one ended badly, to say what they saw, before they are ended."""

_PRINTED = 4000
"""How many of the last characters that a rank printed are kept of a trial that failed."""

OF_THE_MACHINE = "out-of-memory killer"
"""The kind of a trial in which it was not the budget that ran out."""

_SHOWN = 4
"""Of how many ranks that hang it is shown where they stand."""

_LOST_PEER = re.compile(r"Connection (?:closed|reset|refused)|Broken pipe|gloo|NCCL|[Ss]ocket|TCPStore|DistStore")
"""What is in the error of a rank that lost another."""


@dataclass(frozen=True)
class Trial:
    """What came of one trial. Memory is in bytes, of each rank, above ``base``, what it held before training.

    ``outcome`` is ``"fits"``, ``"out of memory"``, ``"refused"`` (by an error of shardkit's), ``"error"``, ``"died"``
    (a rank ended without a word) or ``"hang"``; what went wrong, on which rank and how, is in ``note``, ``rank`` and
    ``details``. ``peak`` is the most that was held at a time: on the CPU resident pages, on a GPU what torch's
    allocator gave out. ``reserved`` is the most that was reserved, which a budget counts. ``held`` is, per rank, what
    was held after each step, and ``in_use`` what the allocator had given out then, and once more after a garbage
    collection. ``asked`` is what could not be allocated, 0 if that isn't known, and ``grown`` the most that a rank
    that died held. ``step_seconds`` are of the slowest rank in each step, without the making of batches; ``tokens``
    are of a batch, where the workload says it; ``evaluations`` are of each rank, if there was one; ``seconds`` are
    those of the whole trial with its start.
    """

    batch: int
    accumulate: int
    budget: int | None
    outcome: Outcome
    peak: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    held: tuple[tuple[int, ...], ...] = ()
    in_use: tuple[tuple[int, ...], ...] = ()
    asked: int = 0
    grown: int = 0
    step_seconds: tuple[float, ...] = ()
    tokens: int | None = None
    evaluations: tuple[Evaluation, ...] = ()
    seconds: float = 0.0
    note: str = ""
    rank: int | None = None
    kind: str = ""
    details: str = field(default="", repr=False)

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"

    def check(self) -> Self:
        """Return the trial if it fits or ran out of memory; else raise what went wrong.

        Raises:
            ShardkitError: the ranks refused, with the same error.
            TrialError: a rank failed, died or hung.
        """
        if self.outcome in ("fits", "out of memory"):
            return self
        if self.outcome == "refused":
            error = getattr(errors, self.kind, ShardkitError)
            if not issubclass(error, LaunchError):
                raise error(self.note)
        text = f"batch {self.batch}: {self.note}"
        raise TrialError(f"{text}\n{self.details}" if self.details else text, self.rank, self.details, self.batch)


class Listener:
    """What a caller hears while trials run; this one ignores it."""

    def plan(self, what: str) -> None:
        """The planner is asked, which takes seconds."""

    def begin(self, batch: int, accumulate: int) -> None:
        """A trial with a micro-batch of this size starts."""

    def progress(self, steps: int, of: int) -> None:
        """The trial has taken so many steps of all."""

    def end(self, trial: Trial) -> None:
        """The trial is over."""


@final
class Trials:
    """Runs trials of one workload. A context: at its end no process and no file of it is left.

    ``timeout`` is in seconds: a trial of which no rank comes forward for so long, such as by ending a step, hangs.
    """

    def __init__(
        self,
        workload: str | Callable[[], Workload],
        *,
        processes: int = 2,
        device: str = "auto",
        steps: int = 4,
        timeout: float = 600,
    ) -> None:
        if not callable(workload):
            if not isinstance(workload, str):
                raise InputError(
                    "a workload is a name, FILE.py:function, or a function that returns a shardkit.Workload, not a "
                    f"{type(workload).__name__}"
                )
            workload = _find.check(workload)
        for name, count in {"processes": processes, "steps": steps}.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name} is a whole number from 1 on, not {count!r}")
        if not timeout > 0:
            raise InputError(f"timeout is above 0 seconds, not {timeout!r}")
        self.workload = workload
        self.processes = processes
        self.device = _device(device, processes)
        self.steps = steps
        self.timeout = timeout
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = b""
        self._imported: set[str] = set()
        self._number = 0

    @property
    def name(self) -> str:
        """The workload's name, or that of its function."""
        workload = self.workload
        return workload if isinstance(workload, str) else getattr(workload, "__name__", type(workload).__name__)

    def run(
        self,
        strategy: Strategy,
        batch: int,
        *,
        accumulate: int | None = None,
        budget: int | None = None,
        steps: int | None = None,
        timed: bool = False,
        evaluate: bool = False,
        listener: Listener | None = None,
    ) -> Trial:
        """Run one trial and return what came of it, whatever that is.

        A ``timed`` one leaves the allocator as it is, whose fixed threshold costs time; its memory is another's. With
        ``evaluate`` the ranks evaluate after the last of ``steps`` steps.
        """
        from shardkit._launch import environment, store
        from shardkit.bench import _budget
        from shardkit.bench._trial import Files, Task

        listener = listener or Listener()
        if budget is not None:
            _budget.check_supported(self.device)
        if accumulate is not None:
            strategy = replace(strategy, accumulate=accumulate)
        empty = Trial(batch, strategy.accumulate, budget, "fits")
        listener.begin(batch, strategy.accumulate)
        start = time.monotonic()
        try:
            steps = steps or self.steps
            folder = self._prepare(Task(self.workload, strategy, batch, steps, budget, self.device, timed, evaluate))
            files = [Files(folder, rank) for rank in range(self.processes)]
            killed = _oom_kills()
            # Held until the ranks have ended, so that the port can't be lost to another program.
            held = store()
            environments = [environment(rank, self.processes, held.port) for rank in range(self.processes)]
            self._order({"start": str(folder), "environments": environments})
            ended, late = self._watch(files, steps, listener)
            del held
            trial = _judge(empty, files, ended, late, self.timeout, _oom_kills() - killed)
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            self.close()
            raise
        trial = replace(trial, seconds=time.monotonic() - start)
        listener.end(trial)
        return trial

    def close(self) -> None:
        """End the process that forks, and with it all ranks, and remove the files."""
        process, folder = self._process, self._folder
        self._process = self._folder = None
        try:
            if process is not None:
                # At the end of its input it ends the ranks, which are in process groups of their own, and itself.
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        with contextlib.suppress(OSError):
                            stream.close()
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    # The kernel then ends the ranks.
                    process.kill()
                    process.wait()
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, task: Task) -> Path:
        """Return the folder of a new trial, with its task; the process that forks has imported what it needs."""
        from shardkit._launch import dump

        if self._process is None:
            self._start()
        assert self._folder is not None
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        path = folder / "task.pickle"
        path.write_bytes(dump(task, "the workload's function"))
        needs = task.strategy.backend
        if needs not in self._imported:
            self._order({"preload": str(path), "backend": needs})
            deadline = time.monotonic() + _START_SECONDS
            while not any("preloaded" in answer for answer in self._answers(0.5)):
                if time.monotonic() > deadline:
                    raise TrialError(f"the process that forks the ranks imports for more than {_START_SECONDS} s")
            self._imported.add(needs)
        return folder

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardkit-bench-"))
        self._waiting, self._imported = b"", set()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # What ranks that are killed leave goes with the rest. A socket among it has no room for a long path.
        temporary = {"TMPDIR": str(self._folder)} if len(str(self._folder)) < 60 else {}
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardkit.bench._serve", str(self._folder), str(os.getpid())],
                # Neither a thread pool nor CUDA, which a check for it would start, can be used after a fork.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    "PYTHONPATH": path,
                    **temporary,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _order(self, what: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """Return what the process that forks has said, after at most so many seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return []
        more = os.read(self._process.stdout.fileno(), 2**16)
        if not more:
            code = self._process.wait()
            assert self._folder is not None
            raise TrialError(f"the process that forks the ranks {_death(code)}\n{_tail(self._folder / 'log')}")
        *lines, self._waiting = (self._waiting + more).split(b"\n")
        return [json.loads(line) for line in lines]

    def _watch(self, files: list[Files], of: int, listener: Listener) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Wait until all ranks have ended; return how each did, and which ones came no further and were ended."""
        ended: dict[int, dict[str, Any]] = {}
        pids: list[int] = []
        late: list[int] = []
        seen: list[int] = []
        told = 0
        moved = time.monotonic()
        grace: float | None = None
        while len(ended) < self.processes:
            for answer in self._answers(0.1):
                pids = answer.get("started", pids)
                if "ended" in answer:
                    ended[answer["ended"]] = answer
            now = time.monotonic()
            come = [file.progress.stat().st_size if file.progress.exists() else 0 for file in files]
            if come != seen:
                moved, seen = now, come
                # The first two are no steps.
                steps = max(0, min(come) - 2)
                if steps != told:
                    listener.progress(told := steps, of)
            if grace is None and any(_failed(files[rank], ended[rank]) for rank in ended):
                grace = now + _GRACE_SECONDS
            if grace is not None and now > grace:
                self._order({"kill": True})
                grace = float("inf")
            if not late and grace is None and now - moved > self.timeout:
                late = [rank for rank in range(self.processes) if rank not in ended and come[rank] == min(come)]
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
                grace = now + 1
        return ended, late


def _judge(
    trial: Trial, files: list[Files], ended: dict[int, dict[str, Any]], late: list[int], timeout: float, kills: int
) -> Trial:
    """Return the trial with what came of it, from what all ranks told and how each ended."""
    from shardkit.bench._evaluation import Evaluation
    from shardkit.bench._trial import Record

    records: dict[int, Record] = {}
    for rank, file in enumerate(files):
        if file.record.exists():
            records[rank] = Record(**json.loads(file.record.read_text()))
    if len(records) == len(files):
        told = [records[rank] for rank in range(len(files))]
        trial = replace(
            trial,
            peak=tuple(record.peak for record in told),
            reserved=tuple(record.reserved for record in told),
            base=tuple(record.base for record in told),
        )
        if all(record.outcome == "fits" for record in told):
            return replace(
                trial,
                held=tuple(tuple(record.held) for record in told),
                in_use=tuple(tuple(record.in_use) for record in told),
                tokens=told[0].tokens,
                evaluations=tuple(Evaluation(**record.evaluation) for record in told if record.evaluation),
                step_seconds=tuple(max(step) for step in zip(*(record.seconds for record in told), strict=True)),
            )
    failed = sorted((rank for rank in records if records[rank].outcome != "fits"), key=lambda rank: records[rank].time)
    short = [rank for rank in failed if records[rank].outcome == "out of memory"]
    if short:
        # What the others say is that they lost it, or the same.
        rank = max(short, key=lambda rank: records[rank].asked)
        record = records[rank]
        what = f"{format_bytes(record.asked)} could not be allocated" if record.asked else _headline(record)
        details = _details(record, files[rank])
        return replace(trial, outcome="out of memory", asked=record.asked, note=what, rank=rank, details=details)
    own = [rank for rank in failed if not _LOST_PEER.search(records[rank].message)]
    if own:
        rank = own[0]
        record = records[rank]
        outcome: Outcome = "refused" if record.outcome == "refused" else "error"
        note = record.message if outcome == "refused" else f"rank {rank}: {_headline(record)}"
        return replace(
            trial, outcome=outcome, note=note, rank=rank, kind=record.kind, details=_details(record, files[rank])
        )
    if late:
        note = f"rank {', '.join(map(str, late))} ended no step within {timeout:g} s, or came as far as its first"
        stacks = [f"rank {rank} stood, and had printed:\n{_tail(files[rank].log)}" for rank in late[:_SHOWN]]
        return replace(trial, outcome="hang", note=note, rank=late[0], details="\n".join(stacks))
    dead = sorted((rank for rank in ended if rank not in records), key=lambda rank: float(ended[rank]["time"]))
    if dead:
        rank = dead[0]
        grown = _grown(files[rank], ended[rank])
        evidence = _evidence(trial, files[rank], ended[rank], grown, kills)
        death = f"rank {rank} {_death(ended[rank]['code'])}"
        outcome = "out of memory" if evidence else "died"
        note = f"{death}, {evidence}" if evidence else f"{death}, without a result or a traceback"
        kind = OF_THE_MACHINE if evidence and ended[rank]["code"] == -signal.SIGKILL else ""
        details = _tail(files[rank].log)
        return replace(trial, outcome=outcome, note=note, rank=rank, kind=kind, grown=grown, details=details)
    rank = failed[0]
    record = records[rank]
    note = f"rank {rank}: {_headline(record)}"
    details = _details(record, files[rank])
    return replace(trial, outcome="error", note=note, rank=rank, kind=record.kind, details=details)


def _grown(files: Files, end: dict[str, Any]) -> int:
    """Return the most that a rank which ended without a word held at a time, above what it held before training."""
    if not files.base.exists():
        return 0
    return max(0, int(end["resident"]) - int(json.loads(files.base.read_text())["base"]))


def _evidence(trial: Trial, files: Files, end: dict[str, Any], grown: int, kills: int) -> str:
    """Return what shows that a rank that ended without a word did so for want of memory, empty if nothing does."""
    if end["code"] == -signal.SIGKILL and kills > 0:
        return "by the kernel, since the machine, or the container, had no memory left"
    if trial.budget is None or end["code"] not in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        return ""
    if "std::bad_alloc" in _tail(files.log):
        return "after it was refused memory (std::bad_alloc)"
    return f"when it held {format_bytes(grown)} of the budget" if grown >= 0.9 * trial.budget else ""


def _failed(files: Files, end: dict[str, Any]) -> bool:
    """Return whether a rank that ended did so before its time."""
    if end["code"] or not files.record.exists():
        return True
    return bool(json.loads(files.record.read_text())["outcome"] != "fits")


def _details(record: Record, files: Files) -> str:
    printed = _tail(files.log)
    return "\n".join(filter(None, [record.traceback.strip(), printed and f"printed by the rank:\n{printed}"]))


def _headline(record: Record) -> str:
    lines = [line for line in record.message.splitlines() if line.strip()]
    return f"{record.kind}: {lines[0]}" if lines else record.kind


def _death(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-_PRINTED:].strip() if path.exists() else ""


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory, here and in this container."""
    count = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        count += next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = "memory" if controllers == "memory" else ""
            name = "memory.oom_control" if controllers == "memory" else "memory.events"
            file = Path("/sys/fs/cgroup", folder, path.lstrip("/"), name)
            if controllers in ("", "memory") and file.exists():
                rows = file.read_text().splitlines()
                count += sum(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))
    return count


def _device(device: str, processes: int) -> str:
    import torch

    enough = torch.cuda.is_available() and torch.cuda.device_count() >= processes
    if device == "auto":
        return "cuda" if enough else "cpu"
    if device == "cpu":
        return device
    if device != "cuda":
        raise InputError(f"a device is auto, cpu or cuda, not {device!r}")
    if not enough:
        raise InputError(
            f"{processes} processes need {processes} GPUs, and torch sees {torch.cuda.device_count()}: leave the "
            "device out, or use cpu"
        )
    return device
