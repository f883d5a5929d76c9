"""Whether all ranks loaded the same weights since they were prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

if TYPE_CHECKING:
    from torch import nn


class Loads:
    """A checksum of the parameters that ``load_state_dict`` has brought to a module or its parts, not to copies of it.

    A load on one rank only, or of other weights on each, would have the ranks part without a word. It costs one pass
    over what is loaded, and nothing in a step. Buffers don't count: they are rank 0's after the next step anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        self.forget()
        hook = _Hook(self, {id(part) for part in module.modules()})
        self._handles = [part.register_load_state_dict_pre_hook(hook) for part in module.modules()]

    def forget(self) -> None:
        """Begin anew: all ranks have weights that are known to be the same."""
        self.sum = 0
        self.count = 0

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()

    def facts(self) -> dict[str, str]:
        """Return what must be the same on every rank, in words for an error."""
        told = f"{self.count} parameters, with checksum {self.sum:08x}"
        return {"weights that load_state_dict brought since prepare, to be loaded on every rank alike": told}

    def add(self, value: torch.Tensor) -> None:
        """Take note of a tensor that is loaded."""
        value = value.detach()
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        self.count += 1
        self.sum = crc32(repr((tuple(value.shape), value.sum(dtype=torch.float64).item())).encode(), self.sum)


class _Hook:
    """Tells of a part's own tensors before they are loaded. A copy of the module, or a pickle of it, tells nothing."""

    def __init__(self, loads: Loads | None = None, parts: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._loads = loads
        self._parts = parts

    def __call__(self, part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._loads is None or id(part) not in self._parts:
            return
        for name in part._parameters:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor):
                self._loads.add(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()
