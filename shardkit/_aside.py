"""Several sessions in one process: what one back-propagates leaves nothing in the parameters of another."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

from shardkit._tripwire import GRADIENT

if TYPE_CHECKING:
    from torch import Tensor, nn

open_asides: list[weakref.ref[Aside]] = []
"""Those of all open sessions. One that nobody holds any more goes without being closed."""


@final
class Aside:
    """Takes the gradients of all other open sessions aside while this one back-propagates.

    A generator's loss goes back through its critic, and leaves gradients there that no step of the critic asked for.
    With ``optimizer.zero_grad()`` the user's loop would drop them; here nobody else would.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._own = weakref.ref(self, _forget)
        open_asides.append(self._own)

    def take(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Take the gradients of the others away, and return them; None where there is no other session."""
        if len(open_asides) < 2:
            return None
        taken: list[tuple[Tensor, Tensor | None]] = []
        for reference in list(open_asides):
            other = reference()
            if other is not None and other is not self:
                for value in other._parameters:
                    taken.append((value, GRADIENT.__get__(value)))
                    GRADIENT.__set__(value, None)
        return taken

    def give_back(self, taken: list[tuple[Tensor, Tensor | None]] | None) -> None:
        """Put back what was taken, in the place of what came since."""
        for value, gradient in taken or ():
            GRADIENT.__set__(value, None)
            # One of a session that failed in its midst may be whole, where its parameter has been split since.
            if gradient is not None and gradient.shape == value.shape:
                GRADIENT.__set__(value, gradient)

    def close(self) -> None:
        """Be no other session's concern any more."""
        _forget(self._own)


def _forget(reference: weakref.ref[Aside]) -> None:
    if reference in open_asides:
        open_asides.remove(reference)
