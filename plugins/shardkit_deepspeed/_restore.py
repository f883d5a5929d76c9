"""The user's module as it was: what DeepSpeed hung on it comes off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn

# What DeepSpeed adds not at once but in training.
_LATER = frozenset({"grad_accum", "applied_pre_backward_ref_cnt", "_external_params"})


@final
class Restore:
    """Remembers which attributes a module, its parts and its parameters have, and removes what DeepSpeed added."""

    def __init__(self, model: nn.Module) -> None:
        self._kinds = [(part, type(part._parameters)) for part in model.modules()]
        self._owners: list[tuple[Any, set[str], set[str]]] = [
            (owner, set(vars(owner)), set()) for owner in (*model.modules(), *model.parameters())
        ]

    def built(self) -> None:
        """Take note that all that was added by now is DeepSpeed's; what comes later may be the user's."""
        self._owners = [(owner, before, set(vars(owner)) - before) for owner, before, _ in self._owners]

    def undo(self) -> None:
        for part, kind in self._kinds:
            if type(part._parameters) is not kind:
                # Not by key: DeepSpeed's mapping gathers what is asked for while a forward runs, or has failed.
                part._parameters = kind(part._parameters.items())
        for owner, before, added in self._owners:
            for name in set(vars(owner)) - before:
                if name in added or name in _LATER or name.startswith("ds_"):
                    del owner.__dict__[name]
