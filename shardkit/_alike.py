"""What all ranks must have alike before a step, and what of one rank all must hear of: one exchange of 16 bytes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final
from zlib import crc32

from shardkit._checks import facts_of
from shardkit._processes import same_everywhere
from shardkit.errors import InputError

if TYPE_CHECKING:
    from types import FrameType

    from torch.optim import Optimizer

    from shardkit._loads import Loads
    from shardkit._processes import Processes


@final
class Alike:
    """Compares the optimizer's settings and the weights that were loaded, and spreads the news of a signal."""

    def __init__(self, optimizer: Optimizer | None, loads: Loads, processes: Processes) -> None:
        self.interrupted = False
        """Whether a signal that is caught had come to any rank before the last step; the same on all ranks."""
        self._optimizer = optimizer
        self._loads = loads
        self._processes = processes
        self.came = False
        """Whether a signal that is caught has come to this rank."""
        self._caught: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def check(self, loss_scale: float) -> None:
        """Compare, before a step. Collective.

        Raises:
            MismatchError: the ranks have other settings, or loaded other weights.
        """
        came = self.came
        if self._processes.world_size > 1:
            assert self._optimizer is not None
            facts = {**facts_of(self._optimizer), "loss scale": {"value": repr(loss_scale)}}
            if not self._processes.all_equal(crc32(repr((facts, came)).encode(), self._loads.sum)):
                told = self._processes.agree(({**facts, **self._loads.facts()}, came))
                came = any(rank_came for _, rank_came in told)
                self.interrupted = self.interrupted or came
                same_everywhere([rank_facts for rank_facts, _ in told])
        self.interrupted = self.interrupted or came

    def catch(self, signals: tuple[int, ...]) -> None:
        """Have signals only be noted, until ``close``. Not collective.

        Raises:
            InputError: one can't be caught, or this isn't the main thread.
        """
        for number in signals:
            if number in self._caught:
                continue
            try:
                self._caught[number] = signal.signal(number, self._note)
            except (OSError, ValueError, TypeError) as error:
                raise InputError(f"signal {number!r} can't be caught here: {error}") from error

    def close(self) -> None:
        """Have signals do what they did before."""
        for number, handler in self._caught.items():
            # None is a handler that wasn't installed from Python: it can't be put back.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        self._caught.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
