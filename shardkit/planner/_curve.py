"""A workload's profile at any batch, from a few that were run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from shardkit.planner._profile import Event, Profile

MOST = 2**24
"""The largest batch that is looked for."""

_MOST_DATA = 2**28
"""Bytes of the largest batch whose data are really made; beyond it all grows in a line."""

_RUNS = 9
"""How often the passes of one precision are run, if batches of unlike sizes fit."""

_REACH = 8
"""How many times the largest batch that was run a line is believed to lead."""

_NEAR = 1.06
"""The ratio of two batches between which lines are taken to be near enough."""


class Curve:
    """Profiles by batch. Between two that were run, and beyond them, each figure lies on the line through theirs.

    What a pass holds between two moments is the most of several sums of sizes, each a number or in proportion to the
    batch: it grows by pieces of lines, ever more steeply. So the line between two of its points is on or above it.
    """

    def __init__(self, run: Callable[[int], Profile]) -> None:
        self._run = run
        self._known: dict[int, Profile] = {}
        self._order: list[int] = []
        self._lines: dict[int, Profile] = {}
        self._same: dict[tuple[int, int], bool] = {}
        self._most = MOST

    def exactly(self, batch: int) -> Profile:
        """Return the profile at a batch that is run, unless its data are too large to be made."""
        for least in (1, 2):
            if least not in self._known:
                self._take(least)
        if batch in self._known:
            return self._known[batch]
        each = max(self._known[2].data - self._known[1].data, 1)
        self._most = min(MOST, max(2, _MOST_DATA // each))
        if batch > self._most:
            return self.near(batch)
        return self._take(batch)

    def _take(self, batch: int) -> Profile:
        self._known[batch] = self._run(batch)
        self._order = sorted(self._known)
        self._lines.clear()
        return self._known[batch]

    def near(self, batch: int) -> Profile:
        """Return the profile at a batch by the line through the two next to it."""
        if batch in self._known:
            return self._known[batch]
        if batch not in self._lines:
            self._lines[batch] = self._line(batch)
        return self._lines[batch]

    def _line(self, batch: int) -> Profile:
        self.exactly(1)
        place = min(max(bisect_left(self._order, batch), 1), len(self._order) - 1)
        one, other = (self._known[self._order[at]] for at in (place - 1, place))
        if not self._alike(one, other):
            return self.exactly(batch) if batch <= self._most else other
        return _between(one, other, batch)

    def _alike(self, one: Profile, other: Profile) -> bool:
        key = one.batch, other.batch
        if key not in self._same:
            self._same[key] = _moments(one) == _moments(other)
        return self._same[key]

    def largest(self, peak: Callable[[Profile], int], limit: int) -> int:
        """Return the largest batch whose peak is within the limit, given that 1 is, and that peaks grow."""
        found = 0
        while True:
            before, found = found, self._search(peak, limit)
            furthest = _REACH * self._order[-1]
            if found > furthest and furthest <= self._most and len(self._known) < _RUNS:
                self.exactly(furthest)
                continue
            if found == before or found in self._known or len(self._known) >= _RUNS or found > self._most:
                return found
            place = bisect_left(self._order, found)
            bracketed = 0 < place < len(self._order)
            if bracketed and self._order[place] <= _NEAR * self._order[place - 1]:
                return found
            self.exactly(found)

    def _search(self, peak: Callable[[Profile], int], limit: int) -> int:
        """Look where the line through the last two peaks meets the limit, and halve what is left where that is slow."""
        low, high = 1, MOST
        points = {at: peak(self.near(at)) for at in (1, 2)}
        if points[2] > limit:
            return 1
        low, one, other = 2, 1, 2
        while high - low > 1:
            rise = (points[other] - points[one]) / (other - one)
            guess = other + int((limit - points[other]) / rise) if rise > 0 else 2 * other
            if not low < guess < high:
                guess = min(2 * low, (low + high) // 2) if guess >= high else low + 1
            points[guess] = peak(self.near(guess))
            if points[guess] <= limit:
                low = guess
            else:
                high = guess
            one, other = (low, high) if high in points else (max(at for at in points if at < low), low)
        return low


def _moments(profile: Profile) -> list[tuple[str, tuple[str, ...]]]:
    return [(event.kind, event.names) for event in profile.events]


def _between(one: Profile, other: Profile, batch: int) -> Profile:
    def line(low: int, high: int) -> int:
        return low + (high - low) * (batch - one.batch) // (other.batch - one.batch)

    events = tuple(
        Event(low.kind, low.names, low.nbytes, line(low.live, high.live), line(low.high, high.high))
        for low, high in zip(one.events, other.events, strict=True)
    )
    return Profile(batch, events, line(one.data, other.data), line(one.kept, other.kept))
