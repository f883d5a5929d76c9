"""Where a session is in its window."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from shardkit._engine import Engine


@final
class Count:
    """The micro-batches of a window: how many there are to be, how many are in, and what each counts."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self.windows: object = None
        """The windows over which a pass is in progress."""
        self.restart()

    def restart(self) -> None:
        """Begin a window of the plain loop."""
        self.micro = 0
        """Backward passes so far."""
        self.expected = self.passes = self._accumulate
        """How often the user is to call backward, and how often the engine's is called: other ranks may need more."""
        self.share = 1 / self._accumulate
        """What the next micro-batch counts."""
        self.exhausted = False
        """Whether all micro-batches of a window of ``session.windows`` were taken."""
        self.real = -1
        """From which micro-batch on they count nothing, since they only keep other ranks company."""
        self.in_window = False
        """Whether the window is one of ``session.windows``."""

    def begin(self, real: int, expected: int, passes: int, share: float) -> None:
        """Begin a window of ``session.windows``."""
        self.expected, self.passes, self.share, self.in_window = expected, passes, share, True
        self.real = real if real < expected else -1
        if self.real == 0:
            self.share = 0.0

    def extend(self, *, last: bool) -> None:
        """Expect one more micro-batch, and another after it unless it is the last; their losses are parts of one."""
        self.expected = self.passes = self.micro + (1 if last else 2)
        self.share = 1.0

    def fill_up(self, engine: Engine, device: torch.device) -> None:
        """Run the backward passes that other ranks have in this window and this one lacks, with a loss of 0."""
        still = torch.zeros((), device=device)
        while self.micro < self.passes:
            nothing = torch.zeros((), device=device, requires_grad=True)
            engine.backward(nothing, still, last=self.micro + 1 == self.passes)
            self.micro += 1

    def abandon(self) -> None:
        """Give a window up of which nothing was used."""
        if self.in_window and self.micro == 0:
            self.restart()

    def is_full(self) -> bool:
        """Return whether all micro-batches of the window are in, and it waits for its step."""
        return 0 < self.micro == self.expected

    def is_between(self) -> bool:
        """Return whether no window is in progress."""
        return self.micro == 0 and not self.in_window
