"""What a plan says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """What a strategy would hold on its fullest rank, in bytes, and the largest batch that fits.

    ``status`` is ``"fits"``, ``"short"`` where batch 1 doesn't, ``"refused"`` where the strategy can't be had: ``note``
    says why. ``peak`` is the most that is held at micro-batch ``batch``: the one that was asked for, or the largest
    that fits, or 1 where none does. Of it are ``parameters``, ``gradients``, ``optimizer`` (its state, with master
    weights), ``buffers`` (of backend, communication and update) and ``activations``, at the ``moment`` when most is
    held: ``"prepare"``, ``"batch"`` (it is made), ``"forward"``, ``"backward"`` or ``"step"``. ``host`` is what is
    offloaded to host memory, where that is another one. ``largest`` is the largest micro-batch that fits, None without
    a limit, and ``short`` what batch 1 needs beyond the limit. ``points`` are pairs of a batch and its peak.
    """

    strategy: str
    precision: str
    status: Literal["fits", "short", "refused"]
    batch: int = 0
    peak: int = 0
    moment: str = ""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    host: int = 0
    largest: int | None = None
    short: int = 0
    speed: float | None = None
    note: str = ""
    points: tuple[tuple[int, int], ...] = ()

    def estimate(self, batch: int) -> int:
        """Return the peak at a batch, in bytes, by the lines through the two points next to it."""
        points = self.points
        if len(points) < 2:
            return self.peak
        place = next((at for at, (known, _) in enumerate(points) if known >= batch), len(points) - 1)
        (one, low), (other, high) = points[max(place, 1) - 1], points[max(place, 1)]
        return round(low + (high - low) * (batch - one) / (other - one))


@dataclass(frozen=True)
class Plan:
    """All rows, with the settings and versions that they hold for."""

    settings: dict[str, Any]
    versions: dict[str, str]
    parameters: int
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def fastest(self) -> Row | None:
        """The row that fits and trains fastest, as its backend's author measured; None where none fits.

        Of equals it is the one with the largest batch, or that holds least where there is no limit. One whose speed
        isn't known comes after all others.
        """
        batch = self.settings.get("batch_size") or 1
        fitting = [row for row in self.rows if row.status == "fits" and (row.largest is None or row.largest >= batch)]
        return max(fitting, key=lambda row: (row.speed or 0.0, row.largest or 0, -row.peak), default=None)

    @property
    def least(self) -> Row | None:
        """The row that needs least, where none fits; None if all are refused."""
        return min((row for row in self.rows if row.status == "short"), key=lambda row: row.peak, default=None)

    @property
    def exit_code(self) -> int:
        """0 if something fits, else 1."""
        return 0 if self.fastest is not None else 1
