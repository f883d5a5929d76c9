"""The user's module as it was: what DeepSpeed hung on it comes off again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

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

    def let_copy(self, stage: int) -> None:
        """Have copies and pickles of the module hold plain parameters, or be refused where there is nothing to copy."""
        for owner, _, added in self._owners:
            if stage == 3:
                owner.__dict__.update(__deepcopy__=_refuse, __reduce_ex__=_refuse)
                added |= {"__deepcopy__", "__reduce_ex__"}
            elif isinstance(owner, torch.Tensor):
                # Else it would be pickled with DeepSpeed's attributes, or the whole flat tensor that it is a view of.
                owner.__dict__["__reduce_ex__"] = _plain(owner)
                added.add("__reduce_ex__")

    def undo(self) -> None:
        for part, kind in self._kinds:
            if type(part._parameters) is not kind:
                # Past DeepSpeed's own ``__getitem__``, which gathers.
                part._parameters = kind(dict.items(part._parameters))
        for owner, before, added in self._owners:
            for name in set(vars(owner)) - before:
                if name in added or name in _LATER or name.startswith("ds_"):
                    del owner.__dict__[name]


def _plain(value: Tensor) -> Any:
    def reduce(protocol: int) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (value.detach().clone(), value.requires_grad, OrderedDict())

    return reduce


def _refuse(_: Any) -> NoReturn:
    raise UnsupportedError(
        "backend 'deepspeed' at stage 3 shards the parameters, and a copy of the module would be empty: load "
        "session.full_weights() into a fresh module, close the session first, or use deepspeed:stage=2 or ddp"
    )
