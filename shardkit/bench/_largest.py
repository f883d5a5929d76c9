"""The largest batch that fits into a budget of memory, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit._prepare import resolve
from shardkit._sizes import parse_bytes
from shardkit._strategy import Strategy
from shardkit.bench._trials import Listener, Trial, Trials

if TYPE_CHECKING:
    from shardkit.workloads import Workload


def measure(
    workload: str | Callable[[], Workload] | Trials,
    strategy: Strategy | str | Path,
    batch: int,
    *,
    memory: int | str | None = None,
    processes: int = 2,
    accumulate: int | None = None,
    device: str = "auto",
    steps: int = 4,
    timeout: float = 600,
    listener: Listener | None = None,
) -> Trial:
    """Train ``steps`` steps with one size of micro-batch, in fresh processes, and return the memory and time it took.

    ``memory`` is a budget per rank, in bytes or as text such as ``"24GiB"``; without one there is no limit. The trial
    that is returned fits or ran out of memory. Of the peak, that with the optimizer's state and all buckets is there
    from the third step on. In the place of a workload may stand an open :class:`Trials`, which has its own processes,
    device, steps and timeout, and starts faster from the second call on.

    Raises:
        ShardkitError: the workload, the strategy or a number is wrong, or the ranks refused with this error.
        TrialError: a rank failed, died or hung, and not for want of memory.
    """
    strategy = resolve(strategy)
    budget = None if memory is None else parse_bytes(memory)
    if isinstance(workload, Trials):
        return workload.run(strategy, batch, accumulate=accumulate, budget=budget, listener=listener).check()
    with Trials(workload, processes=processes, device=device, steps=steps, timeout=timeout) as trials:
        return trials.run(strategy, batch, accumulate=accumulate, budget=budget, listener=listener).check()
