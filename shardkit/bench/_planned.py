"""What the planner knows that a search can start from, and what it would advise where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardkit._registry import backends
from shardkit._sizes import format_bytes
from shardkit._strategy import Strategy
from shardkit.bench._trials import Listener
from shardkit.errors import ShardkitError
from shardkit.planner._make import plan

if TYPE_CHECKING:
    from shardkit.planner._results import Plan
    from shardkit.workloads import Workload

_OTHERS = 3
"""How many other strategies an advice names."""


class Planned:
    """The planner's answers for one search; a workload that it can't run without real numbers has none."""

    def __init__(
        self,
        workload: str | Callable[[], Workload],
        strategy: Strategy,
        *,
        memory: int,
        processes: int,
        device: str,
        timeout: float,
        listener: Listener | None,
    ) -> None:
        self._workload = workload
        self._strategy = strategy
        self._memory = memory
        self._processes = processes
        self._device = device
        self._timeout = timeout
        self._listener = listener or Listener()

    def estimate(self) -> Callable[[int], float] | None:
        """Return the peak that the planner predicts, by batch; None where it can't."""
        self._listener.plan("where to start")
        made = self._plan([self._strategy])
        return None if made is None or not made.rows[0].peak else made.rows[0].estimate

    def alternatives(self) -> str:
        """Return in words what would fit into the memory, and what this strategy needs."""
        self._listener.plan("what would fit")
        variants = [variant.strategy for backend in backends().values() for variant in backend.variants]
        made = self._plan([self._strategy, *variants])
        if made is None:
            return "more memory or ranks, or a strategy that shards more, may do"
        own = made.rows[0]
        told = []
        fitting = [row for row in made.rows if row.status == "fits"]
        if fitting:
            first = sorted(fitting, key=lambda row: -(row.speed or 0.0))[:_OTHERS]
            rows = ", ".join(f"{row.strategy} up to batch {row.largest}" for row in first)
            told.append(f"what would fit, as planned: {rows}")
        if own.status == "short":
            told.append(f"{self._strategy} needs about {format_bytes(own.peak)} per rank")
        if not fitting and made.least is not None and made.least.strategy != own.strategy:
            told.append(f"{made.least.strategy} needs least, about {format_bytes(made.least.peak)} per rank")
        return "; ".join(told) or "nothing would fit, as planned"

    def _plan(self, strategies: list[Strategy | str]) -> Plan | None:
        try:
            return plan(
                self._workload,
                memory=self._memory,
                processes=self._processes,
                strategies=strategies,
                precisions=[self._strategy.precision],
                device=self._device,
                timeout=self._timeout,
            )
        except ShardkitError:
            return None
