"""One order in which gradients are averaged, on every rank and in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    Release = Callable[[int], None]


@final
class Order:
    """Lets gradients go to be averaged in one fixed order, whatever order they come in.

    DeepSpeed averages in the order in which a rank's own backward brings gradients. Ranks whose passes differ, by a
    branch of the model or an unused parameter, would average different parameters with each other: garbage where the
    sizes are equal, an abort where they are not. Here a gradient that comes early waits for those before it, and those
    that don't come at all go last, as zeros. The order is that in which rank 0's first backward brought them, so that
    in an ordinary step nothing waits.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = device
        # Before the first backward: about the order of a backward.
        self._order = list(range(count - 1, -1, -1))
        self._arrived: list[int] | None = []
        self._ready = bytearray(count)
        self._next = 0

    def arrive(self, index: int, release: Release) -> bool:
        """Take a gradient that is complete; false if the parameter's gradient had come before in this backward."""
        if self._ready[index]:
            return False
        self._ready[index] = 1
        if self._arrived is not None:
            self._arrived.append(index)
        while self._next < self._count and self._ready[self._order[self._next]]:
            release(self._order[self._next])
            self._next += 1
        return True

    def finish(self, release: Release, supply: Release) -> None:
        """End a backward: let the rest go, after ``supply`` gave a gradient to each parameter that has none.

        Collective the first time.
        """
        while self._next < self._count:
            index = self._order[self._next]
            if not self._ready[index]:
                supply(index)
            release(index)
            self._next += 1
        if self._arrived is not None:
            self._order = self._agreed(self._arrived)
            self._arrived = None
        self.restart()

    @property
    def learned(self) -> list[int] | None:
        """The order that was learned; None before the first backward."""
        return None if self._arrived is not None else list(self._order)

    def learn(self, order: list[int] | None) -> None:
        """Take up an order, the same on every rank; None: that of the next backward."""
        self._arrived = [] if order is None else None
        self._order = list(range(self._count - 1, -1, -1)) if order is None else order
        self.restart()

    def restart(self) -> None:
        """Forget the backward in progress."""
        if self._arrived is not None:
            self._arrived.clear()
        self._ready = bytearray(self._count)
        self._next = 0

    def _agreed(self, arrived: list[int]) -> list[int]:
        came = set(arrived)
        order: Tensor = torch.tensor(
            arrived + [index for index in self._order if index not in came], device=self._device
        )
        if dist.get_world_size() > 1:
            dist.broadcast(order, src=0)
        return [int(index) for index in order.tolist()]
