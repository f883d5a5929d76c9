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

_NEAR = 1.2
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
        self._most = MOST

    def exactly(self, batch: int) -> Profile:
        """Return the profile at a batch that is run, unless its data are too large to be made."""
        if batch not in self._known:
            if batch > self._most:
                return self.near(batch)
            found = self._run(batch)
            self._known[batch] = found
            self._order = sorted(self._known)
            self._most = min(self._most, max(batch, _MOST_DATA * batch // max(found.data, 1)))
        return self._known[batch]

    def near(self, batch: int) -> Profile:
        """Return the profile at a batch by the line through the two next to it."""
        if batch in self._known:
            return self._known[batch]
        for least in (1, 2):
            self.exactly(least)
        place = min(max(bisect_left(self._order, batch), 1), len(self._order) - 1)
        one, other = (self._known[self._order[at]] for at in (place - 1, place))
        if _moments(one) != _moments(other):
            return self.exactly(batch) if batch <= self._most else other
        return _between(one, other, batch)

    def largest(self, fits: Callable[[Profile], bool]) -> int:
        """Return the largest batch that fits, given that 1 does, and that none does above one that doesn't."""
        found = 0
        while True:
            before, found = found, self._search(fits)
            if found == before or found in self._known or len(self._known) >= _RUNS or found > self._most:
                return found
            place = bisect_left(self._order, found)
            bracketed = 0 < place < len(self._order)
            if bracketed and self._order[place] <= _NEAR * self._order[place - 1]:
                return found
            self.exactly(found)

    def _search(self, fits: Callable[[Profile], bool]) -> int:
        low, high = 1, 2
        while high < MOST and fits(self.near(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if fits(self.near(middle)):
                low = middle
            else:
                high = middle
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
    return Profile(batch, events, line(one.data, other.data))
