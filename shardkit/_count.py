"""Where a session is in its window."""

from __future__ import annotations

from collections.abc import Callable
from typing import final


@final
class Count:
    """The micro-batches of a window: how many there are to be, how many are in, and what each counts."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self.restart()

    def restart(self) -> None:
        """Begin a window of the plain loop."""
        self.micro = 0
        """Backward passes so far."""
        self.expected = self.passes = self._accumulate
        """How often the user is to call backward, and how often the engine's is called: other ranks may need more."""
        self.share = 1 / self._accumulate
        """What the next micro-batch counts."""
        self.in_window = False
        """Whether the window is one of ``session.windows``."""

    def begin(self, expected: int, passes: int, share: float) -> Callable[[], None]:
        """Begin a window of ``session.windows``; return what makes the micro-batches that follow count nothing."""
        self.expected, self.passes, self.share, self.in_window = expected, passes, share, True
        return self._discount

    def is_between(self) -> bool:
        """Return whether no window is in progress."""
        return self.micro == 0 and not self.in_window

    def _discount(self) -> None:
        self.share = 0.0
