"""``shardkit.plan``: the planner in a process of its own, since building a workload seeds the generators."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardkit import _registry
from shardkit._options import typed_options
from shardkit._sizes import parse_bytes
from shardkit._strategy import Strategy
from shardkit.errors import InputError, ShardkitError, StrategyError
from shardkit.planner._results import Plan
from shardkit.tools.compare import split_strategies
from shardkit.tools.listing import versions
from shardkit.workloads import _find

if TYPE_CHECKING:
    from shardkit.workloads import Workload

PRECISIONS = ("fp32", "bf16", "fp16")


def plan(
    workload: str | Callable[[], Workload],
    *,
    memory: int | str | None = None,
    processes: int = 2,
    strategies: Sequence[str | Strategy] = (),
    precisions: Sequence[str] = PRECISIONS,
    batch_size: int | None = None,
    accumulate: int = 1,
    device: str = "auto",
    timeout: float = 600,
) -> Plan:
    """Say what each strategy would hold in memory while it trains the workload, and what batch fits.

    Nothing of the model is allocated: its passes and the optimizer's step run on tensors that have shapes and no
    memory, and what the backend adds is told by its plugin. ``workload`` is a built-in name, ``FILE.py[:function]`` or
    a function that returns a :class:`~shardkit.Workload`. ``memory`` is that of one rank beside what the process holds
    before it trains, in bytes or as ``"24GiB"``; without it there is no limit, and no largest batch. ``processes`` is
    the number of ranks; none of them need exist. ``strategies`` are all declared variants unless they are named, each
    in each of ``precisions``. ``batch_size`` is the micro-batch whose peak is told; None: the largest that fits.
    ``device`` is ``"cpu"``, ``"cuda"``, which needn't be here, or ``"auto"``: ``"cuda"`` where there is one.

    Raises:
        InputError: the workload or a number is wrong, or the workload can't be run without real numbers.
        StrategyError: a strategy or a precision is wrong.
    """
    if isinstance(workload, str):
        workload = _find.check(workload)
    for name, count in {"processes": processes, "accumulate": accumulate, "batch size": batch_size}.items():
        if count is not None and count < 1:
            raise InputError(f"{name} is at least 1, not {count}")
    limit = None if memory is None else parse_bytes(memory)
    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown or not precisions:
        raise StrategyError(f"precision is one of {', '.join(PRECISIONS)}, not {', '.join(unknown) or 'none'}")
    device = _device(device)
    asked = _strategies(strategies, precisions, accumulate)

    from shardkit._launch import launch
    from shardkit.planner._plan import Task, rows_alone

    start = time.monotonic()
    task = Task(tuple(asked), limit, processes, batch_size, device)
    outcome = launch(rows_alone, workload, task, processes=1, timeout=timeout)[0]
    if isinstance(outcome, ShardkitError):
        raise outcome
    settings: dict[str, Any] = {
        "workload": workload if isinstance(workload, str) else getattr(workload, "__qualname__", repr(workload)),
        "memory": limit,
        "processes": processes,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "device": device,
    }
    return Plan(settings, versions(), outcome.parameters, outcome.rows, outcome.notes, seconds=time.monotonic() - start)


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is 'auto', 'cpu' or 'cuda', not {device!r}")
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _strategies(asked: Sequence[str | Strategy], precisions: Sequence[str], accumulate: int) -> list[Strategy]:
    """Return each strategy in each precision; one that sets a precision itself in that one."""
    from shardkit._prepare import resolve

    if isinstance(asked, str):
        asked = [asked]
    texts = [text for text in asked if isinstance(text, str)]
    named = [text for text in asked if not isinstance(text, str)]
    named += [resolve(text) for text in split_strategies(texts)]
    if not asked:
        named = [
            Strategy.parse(variant.strategy)
            for backend in _registry.backends().values()
            for variant in backend.variants
        ]
    if asked:
        for strategy in named:
            # A wrong name is no row of a table.
            typed_options(_registry.describe(strategy.backend), strategy.options)
    found = []
    for strategy in named:
        own = (strategy.precision,) if strategy.precision != "fp32" else precisions
        window = strategy.accumulate if strategy.accumulate > 1 else accumulate
        found += [dataclasses.replace(strategy, precision=precision, accumulate=window) for precision in own]
    return found
