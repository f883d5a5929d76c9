"""What a benchmark found, as data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

FORMAT = 1
"""Of the JSON: rises when a name is taken away or means something else; names are added without it."""

Status = Literal["measured", "out of memory", "refused", "missing", "failed"]


@dataclass(frozen=True)
class Spread:
    """A median, the quartiles on both sides of it, and how many values they are of."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Return the spread of some values, None of none."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))


@dataclass(frozen=True)
class Row:
    """What came of one strategy in one precision.

    ``batch`` is the micro-batch of a rank that all of the row holds for: the largest that fits, or the one asked for.
    ``status`` is ``"missing"`` where the library isn't installed, ``"refused"`` where the backend says that it can't do
    it right; ``note`` says why, ``details`` has the full error. ``trials`` is how many were run to find the batch, and
    ``notes`` say what it holds for. ``peak_memory`` is in bytes, of each rank, above what it held before.
    ``step_seconds`` are of an optimizer step on the slowest rank. ``samples_per_second`` and ``tokens_per_second`` are
    over all ranks. ``train_seconds`` is for ``settings["items"]`` samples and ``evaluation_seconds`` for
    ``settings["evaluation_items"]``, both computed from what was timed. ``batch_ratio``, ``speed_ratio`` and
    ``memory_ratio`` are over the baseline's: of the speed, round for round. ``evaluation_note`` says why there is no
    evaluation, where there is none. ``seconds`` is what all took.
    """

    strategy: str
    precision: str
    status: Status
    note: str = ""
    batch: int | None = None
    trials: int = 0
    notes: tuple[str, ...] = ()
    peak_memory: tuple[int, ...] = ()
    step_seconds: Spread | None = None
    samples_per_second: Spread | None = None
    tokens_per_second: Spread | None = None
    train_seconds: float | None = None
    evaluation_samples_per_second: Spread | None = None
    evaluation_seconds: float | None = None
    evaluation_note: str = ""
    batch_ratio: float | None = None
    speed_ratio: Spread | None = None
    memory_ratio: float | None = None
    seconds: float = 0.0
    details: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The strategy, with its precision where that isn't fp32."""
        return self.strategy if self.precision == "fp32" else f"{self.strategy} in {self.precision}"

    @property
    def outcome(self) -> str:
        """Why there are no numbers, in a few words; empty where there are."""
        if self.status == "measured":
            return ""
        return f"out of memory at batch {self.batch}" if self.status == "out of memory" else self.status


@dataclass(frozen=True)
class Bench:
    """A table: the baseline is the first row.

    ``noise`` are, for each round, the samples per second of the baseline's second run over those of its first.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    date: str
    command: str
    rows: tuple[Row, ...]
    noise: tuple[float, ...] = ()

    @property
    def baseline(self) -> Row:
        return self.rows[0]

    @property
    def noise_factor(self) -> float | None:
        """How many times as fast as itself the baseline was at most, or how many times as slow; None if unknown."""
        return max((max(ratio, 1 / ratio) for ratio in self.noise), default=None)

    def within_noise(self, row: Row) -> bool:
        """Return whether a row's speed differs from the baseline's by no more than the baseline's from itself."""
        if row.speed_ratio is None or self.noise_factor is None:
            return False
        return 1 / self.noise_factor <= row.speed_ratio.median <= self.noise_factor

    @property
    def exit_code(self) -> int:
        """1 if a row failed, else 0: what doesn't fit, is refused or isn't installed is an answer."""
        return int(any(row.status == "failed" for row in self.rows))
