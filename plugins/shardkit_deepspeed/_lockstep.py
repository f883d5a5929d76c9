"""Stage 3: ranks gather the same module's parameters, or say so before they gather another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from shardkit.lockstep import Lockstep as Places
from shardkit.lockstep import Words

if TYPE_CHECKING:
    from torch import nn

_WORDS = Words("backend 'deepspeed' at stage 3", "deepspeed:stage=2 or ddp")


@final
class Lockstep:
    """Compares the order in which ranks run modules, forwards and in backward."""

    def __init__(self, model: nn.Module) -> None:
        # Number 0 is for what was added to the module since.
        names = ["a new module", *(repr(name or type(model).__name__) for name, _ in model.named_modules())]
        self._numbers = {id(part): at + 1 for at, part in enumerate(model.modules())}
        self._holds = {id(part) for part in model.modules() if next(part.parameters(recurse=False), None) is not None}
        places = [place for name in names for place in (f"{name} in backward", name)]
        self._lockstep = Places(places, _WORDS)
        self.end = self._lockstep.end
        self.restart = self._lockstep.restart
        self.close = self._lockstep.close

    def enter(self, part: nn.Module, forward: bool) -> None:
        """Take note that this rank is about to gather the parameters of ``part``. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        if id(part) not in self._holds and not getattr(part, "_external_params", None):
            return
        self._lockstep.enter(self._numbers.get(id(part), 0) * 2 + forward)
