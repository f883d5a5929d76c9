"""Counts the bytes of tensors as they come and go."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class Ledger(TorchDispatchMode):
    """Within this context, counts the memory of every tensor that an operation makes, until it is freed.

    ``now`` is what is held, and ``high`` the most since it was last set, in bytes. A memory that several tensors share
    counts once. Torch's own ``MemTracker`` says what was held at the peak of a module; a plan needs the curve between
    the gradients of two parameters, to add what a backend holds at each moment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.high = 0
        self._known: dict[int, int] = {}

    def leave_out(self, tensor: Tensor) -> int:
        """Count this tensor's memory no more; return its bytes."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            self.now -= self._known[place]
        else:
            weakref.finalize(storage, self._known.pop, place, None)
        self._known[place] = 0
        return storage.nbytes()

    def count(self, tensor: Tensor) -> None:
        """Count this tensor's memory, unless it is known already."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._known:
            size = storage.nbytes()
            self._known[place] = size
            self.now += size
            self.high = max(self.high, self.now)
            weakref.finalize(storage, self._free, place)

    def _free(self, place: int) -> None:
        self.now -= self._known.pop(place, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.count(result)
        else:
            for value in tree_leaves(result):
                if isinstance(value, Tensor):
                    self.count(value)
        return result


def storages(tensors: Any) -> int:
    """Return the bytes of all tensors in a nest of containers, memory that several share once."""
    found = {}
    for value in tree_leaves(tensors):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())
