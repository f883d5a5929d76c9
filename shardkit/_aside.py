"""Several sessions in one process: what one back-propagates leaves nothing in the parameters of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from shardkit._tripwire import GRADIENT

if TYPE_CHECKING:
    from torch import Tensor, nn

open_asides: list[Aside] = []
"""Those of all open sessions."""


@final
class Aside:
    """Takes the gradients of all other open sessions aside while this one back-propagates.

    A generator's loss goes back through its critic, and leaves gradients there that no step of the critic asked for.
    With ``optimizer.zero_grad()`` the user's loop would drop them; here nobody else would.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        open_asides.append(self)

    def take(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Take the gradients of the others away, and return them; None where there is no other session."""
        if len(open_asides) < 2:
            return None
        taken: list[tuple[Tensor, Tensor | None]] = []
        for other in open_asides:
            if other is not self:
                for value in other._parameters:
                    taken.append((value, GRADIENT.__get__(value)))
                    GRADIENT.__set__(value, None)
        return taken

    def give_back(self, taken: list[tuple[Tensor, Tensor | None]] | None) -> None:
        """Put back what was taken, in the place of what came since."""
        for value, gradient in taken or ():
            GRADIENT.__set__(value, None)
            if gradient is not None:
                GRADIENT.__set__(value, gradient)

    def close(self) -> None:
        """Be no other session's concern any more."""
        if self in open_asides:
            open_asides.remove(self)
