"""What is run: a workload, or a user's own loop, and the settings that all runs of a comparison share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardkit._strategy import Strategy
from shardkit.errors import InputError
from shardkit.workloads import _find

OF_A_LOOP = ("processes", "seed", "device")
"""What of a work holds for a loop too: it knows its other sizes itself."""


@dataclass(frozen=True)
class Work:
    """A workload, or a loop, and its size.

    ``target`` is a built-in workload's name or ``FILE.py[:FUNCTION]``, with settings or not. A function that needs no
    arguments makes a workload; a loop takes a strategy and a function ``record``: it prepares a session, and trains
    within ``with record(session):``. ``batch_size`` is that of a micro-batch of one rank. Of the sizes only
    ``processes``, ``seed`` and ``device`` hold for a loop.
    """

    target: str
    steps: int = 6
    processes: int = 2
    batch_size: int = 2
    accumulate: int = 3
    max_grad_norm: float | None = None
    seed: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        sizes = {"steps": self.steps, "processes": self.processes, "batch size": self.batch_size}
        for name, count in sizes.items():
            if count < 1:
                raise InputError(f"{name} is at least 1, not {count}")
        # It checks the rest.
        Strategy("any", accumulate=self.accumulate, max_grad_norm=self.max_grad_norm, seed=self.seed)


@dataclass(frozen=True)
class Task:
    """One run of the work.

    ``kind`` is ``"arm"`` for a strategy, ``"baseline"`` for torch's own DDP without shardkit's plugins, ``"reference"``
    for one process that trains in float64 on the whole global batch. The trace goes to the file ``trace``; a byte to
    the file ``progress`` for each step; what the ranks print to ``log``.
    """

    work: Work
    kind: Literal["arm", "baseline", "reference"]
    trace: str
    progress: str
    log: str
    timeout: float
    strategy: str = ""
    control: bool = False
    any_version: bool = False
    detail: str = "sketch"

    @property
    def ranks(self) -> int:
        return 1 if self.kind == "reference" else self.work.processes


def required_of(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function must be given."""
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )


def function_of(target: str) -> tuple[Callable[..., Any], bool]:
    """Return the function that a target names, and whether it is a loop; imports its file.

    Raises:
        InputError: there is no such file or function, or it takes other arguments.
    """
    plain = _find.any_function(target)
    required = required_of(plain)
    if not required:
        return _find.function(target), False
    if required == 2:
        return plain, True
    raise InputError(
        f"{target!r} takes {required} arguments: a workload takes none, and a loop two, a strategy and record"
    )


def resolved(work: Work) -> tuple[Work, bool]:
    """Return the work with its target's path made absolute and its device found, and whether it is a loop.

    Raises:
        InputError: there is no such workload, or no such device.
    """
    import torch

    target = _find.check(work.target)
    device = work.device
    if device == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= work.processes
        device = "cuda" if enough else "cpu"
    elif device != "cpu" and not torch.cuda.is_available():
        raise InputError(f"there is no device {device!r} on this machine: torch sees none; leave it out, or use cpu")
    _, is_loop = function_of(target)
    return replace(work, target=target, device=device), is_loop
