"""The user's module as it was: what fully_shard hung on it comes off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from torch import nn
from torch.distributed._composable_state import _module_state_mapping

from shardkit_fsdp._sharded import refuse_copy


@final
class Restore:
    """Remembers what attributes and class the parts of a module have, and removes what was added."""

    def __init__(self, model: nn.Module) -> None:
        self._kinds = [(part, type(part)) for part in model.modules()]
        self._before = [(part, set(vars(part))) for part in model.modules()]
        self._added: list[tuple[nn.Module, set[str]]] = []
        self._values = [(value, set(vars(value))) for value in model.parameters()]
        self.handles: list[Any] = []
        """Hooks that come off."""

    def classes(self) -> None:
        """Give the parts their own classes back."""
        for part, kind in self._kinds:
            if type(part) is not kind:
                part.__class__ = kind

    def built(self) -> None:
        """Take note that all that was added by now is to be removed; what comes later may be the user's."""
        for part, _ in self._before:
            # By these the compiler takes a module for one of fully_shard's, with other parameters than it has here.
            for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                part.__dict__.pop(name, None)
            part.__dict__.update(__deepcopy__=refuse_copy, __reduce_ex__=refuse_copy)
        self._added = [(part, set(vars(part)) - before) for part, before in self._before]

    def hooks(self) -> None:
        """Take note of the hooks that fully_shard has put on the parts by now."""
        for part, _ in self._before:
            found = _module_state_mapping.get(part)
            state: Any = None if found is None else found()
            if state is None:
                continue
            self.handles += [state._pre_forward_hook_handle, state._post_forward_hook_handle]
            for group in state._fsdp_param_groups:
                self.handles += group._module_to_pre_save_state_dict_hook_handle.values()
                self.handles += group._module_to_pre_load_state_dict_hook_handle.values()
                self.handles += [record._post_load_hook_handle for record in group.fsdp_params]

    def wrap(self, part: nn.Module, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Have a method of the user's module run within a context."""
        plain = getattr(part, name, None)
        if not callable(plain):
            return

        @functools.wraps(plain)
        def within(*args: Any, **kwargs: Any) -> Any:
            with context():
                return plain(*args, **kwargs)

        part.__dict__[name] = within

    def undo(self) -> None:
        """Remove all of it."""
        for handle in self.handles:
            handle.remove()
        self.classes()
        added = self._added or [(part, set(vars(part)) - before) for part, before in self._before]
        for part, names in added:
            for name in names:
                part.__dict__.pop(name, None)
            _module_state_mapping.pop(part, None)
        for value, before in self._values:
            for name in set(vars(value)) - before:
                if name == "_fsdp_orig_uid":
                    del value.__dict__[name]
