"""Which batch to try next: from what is known of the memory that batches took to the largest one that fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import final

_CAUTION = 1.1
"""What an estimate is multiplied by at first: what a batch takes that fits is known, not that of one that fails."""

_NOISE = 16 * 2**20
"""Bytes apart from which on a line through two peaks says more of what a sample takes than of their noise."""

_REACH = 16
"""How many times the largest size that was measured a line may be believed to lead."""

_SHORT = 0.85
"""The part of a long way to a predicted size that is gone at first, since from a size that fits the rest is known."""

_NEAR = 0.1
"""The part of a size within which a prediction is off by noise, and beyond which by what it was made from."""


@final
class Search:
    """A search for the largest of some sizes that fits into a budget: it says what to try, and is told what came of it.

    ``sizes`` are candidates, ascending. ``estimate`` says about how many bytes a size takes. What was measured is taken
    to grow with the size, ever faster if anything, as the peak of a training does: it is the largest of several sums
    that each grow by so much a sample. Only the number of trials depends on any of this: the search ends when a size
    was tried and fitted, and the next larger one was tried and failed.
    """

    def __init__(self, sizes: Sequence[int], budget: int, estimate: Callable[[int], float] | None = None) -> None:
        self._sizes = sizes
        self._budget = budget
        self._estimate = estimate
        self._peaks: dict[int, float] = {}
        """Of the places of sizes that fitted, the bytes that they took."""
        self._low = -1
        """The place of the largest size that fitted."""
        self._high = len(sizes)
        """That of the smallest that failed."""
        self._fails = 0
        """How many trials have failed since the last that fitted."""
        self._beyond = 0
        """How many trials since the last that failed went where memory should end."""

    @property
    def largest(self) -> int | None:
        """The largest size that fitted so far; None if none has."""
        return self._sizes[self._low] if self._low >= 0 else None

    def next(self) -> int | None:
        """Return the size to try, or None when the largest that fits is known."""
        if self._high - self._low <= 1:
            return None
        place = self._guess() if self._peaks else self._first()
        return self._sizes[min(max(place, self._low + 1), self._high - 1)]

    def fitted(self, size: int, peak: float) -> None:
        """Hear that a size fitted, and how many bytes it took."""
        place = bisect.bisect_left(self._sizes, size)
        self._peaks[place] = peak
        self._low = max(self._low, place)
        self._fails = 0

    def failed(self, size: int) -> None:
        """Hear that a size didn't fit."""
        self._high = min(self._high, bisect.bisect_left(self._sizes, size))
        self._fails, self._beyond = self._fails + 1, 0

    def _first(self) -> int:
        """Return the place of the first size to try, or of the next after only failures."""
        if self._estimate is None:
            return self._place(4) if self._high == len(self._sizes) else self._between()
        if self._fails == 0:
            # Where the model takes most of the budget, a tenth of it is more than all batches take.
            middle = self._sizes[self._fitting(self._estimated)] / 2
            return max(self._fitting(lambda size: _CAUTION * self._estimated(size)), self._place(middle))
        # It was too low by more than that: what failed takes more than the budget.
        short = max(self._budget / self._estimated(self._sizes[self._high]), 1.0)
        return self._fitting(lambda size: self._estimated(size) * short * (1 + 0.15 * 2**self._fails))

    def _guess(self) -> int:
        """Return the place where the budget should end, from what was measured and where it can't be."""
        place = self._predicted()
        unit = self._unit()
        if place < self._high and place - self._low <= unit:
            # It ends here, or further on than was measured: to see how far, in steps that double.
            place = max(place, self._low + (unit << self._beyond if self._beyond else 1))
            self._beyond += 1
            return place if place < self._high else self._low + (self._high - self._low + 1) // 2
        if place < self._high:
            self._beyond = 0
            return place
        # What was measured says that a size fits that didn't. Of one that lies far from what was measured it may be far
        # off, and a size between that fits will tell; of one that lies near it is off by the noise.
        gap = self._high - self._low
        if gap > max(8, _NEAR * self._low):
            return self._between()
        near = self._high - (self._unit() << max(self._fails - 1, 0))
        return near if near > self._low else self._low + gap // 2

    def _predicted(self) -> int:
        last = self._low
        size, peak = self._sizes[last], self._peaks[last]
        before = self._before(last)
        if self._estimate is None:
            if before is None:
                # Twice the samples take at most twice the memory.
                return self._place(max(size * self._budget / max(peak, 1.0), 2 * size))
            slope = max((peak - self._peaks[before]) / (size - self._sizes[before]), 1.0)
            return self._place(min(size + (self._budget - peak) / slope, _REACH * size))
        estimated = max(self._estimated(size), 1.0)
        if before is None:
            # Too low by as much everywhere, or by as many times: the larger prediction is the safer.
            apart, times = peak - estimated, peak / estimated
            place = self._fitting(lambda other: max(self._estimated(other) + apart, self._estimated(other) * times))
            # Over a long way the slope counts, of which one size says nothing.
            far = self._sizes[place] - size
            return self._place(size + _SHORT * far) if far > size and len(self._peaks) == 1 else place
        growth = estimated - self._estimated(self._sizes[before])
        # Of a growth that is no more than noise the estimate knows more.
        ratio = (max(peak - self._peaks[before], 0.0) + _NOISE / 4) / (max(growth, 0.0) + _NOISE / 4)
        return self._fitting(lambda other: peak + ratio * (self._estimated(other) - estimated))

    def _unit(self) -> int:
        """Return how many places make up for the noise of what was measured."""
        last = self._low
        before = self._before(last)
        peak, size = self._peaks[last], self._sizes[last]
        taken = (peak - self._peaks[before]) / (size - self._sizes[before]) if before is not None else peak / size
        further = self._sizes[min(last + 1, len(self._sizes) - 1)] - size
        return max(1, min(round(_NOISE / 256 / max(taken * further, 1.0)), self._low // 16))

    def _before(self, last: int) -> int | None:
        """Return the place of another size that fitted, far enough from the last one for a line through both."""
        others = [place for place in sorted(self._peaks, reverse=True) if place < last]
        far = [place for place in others if self._peaks[last] - self._peaks[place] >= _NOISE]
        return next(iter(far), others[-1] if others else None)

    def _estimated(self, size: int) -> float:
        assert self._estimate is not None
        return float(self._estimate(size))

    def _fitting(self, memory: Callable[[int], float]) -> int:
        """Return the place of the largest size of which this memory is within the budget, the first if none is."""
        low, high = 0, len(self._sizes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if memory(self._sizes[middle]) <= self._budget else (low, middle)
        return low

    def _between(self) -> int:
        """Return a place between the largest size that fitted and the smallest that failed."""
        low, high = self._sizes[self._low] if self._low >= 0 else 0, self._sizes[self._high]
        return self._place(math.sqrt(max(low, 1) * high) if high > 3 * low else (low + high) / 2)

    def _place(self, size: float) -> int:
        """Return the place of the largest size up to this one, the first if all are larger."""
        return max(0, bisect.bisect_right(self._sizes, math.floor(size)) - 1)
