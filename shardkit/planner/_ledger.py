"""Counts the bytes of tensors as they come and go."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardkit.planner._kernels import taken

_MAPPED = 128 * 1024
"""Bytes from which on glibc maps a block by itself, where its threshold is fixed, as trials of memory have it."""

_PAGE = 4096
_HEADER = 64 + 32
"""What torch's alignment of 64 and glibc's own words add to a block that is mapped."""


@final
class Ledger(TorchDispatchMode):
    """Within this context, counts the memory of every tensor that an operation makes, until it is freed.

    ``now`` is what is held, and ``high`` the most since it was last set, in bytes. A memory that several tensors share
    counts once. With ``cpu`` it is counted as there, by a process whose C library is glibc, which hands it out in pages
    where a block is large, and where it is small from a heap that keeps what is freed for the small blocks that come
    after. So is then what a kernel is known to take for itself.

    Torch's own ``MemTracker`` says what was held at the peak of a module; a plan needs the curve between the gradients
    of two parameters, to add what a backend holds at each moment.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cpu = cpu
        self._known: dict[int, int] = {}
        self._large = 0
        self._small = 0
        self._heap = 0
        """The most that small blocks came to, which the heap keeps; what they come to now without one."""
        self._high = 0

    @property
    def now(self) -> int:
        return self._large + self._heap

    @property
    def high(self) -> int:
        return self._high

    @property
    def kept(self) -> int:
        """What the heap holds of blocks that were freed."""
        return self._heap - self._small

    def forget_high(self) -> None:
        """Let ``high`` count from now."""
        self._high = self.now

    def hold(self, size: int) -> None:
        """Count so many bytes more, for good."""
        self._large += size
        self._high = max(self._high, self.now)

    def leave_out(self, tensor: Tensor) -> int:
        """Count this tensor's memory no more; return its bytes."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            size = self._known[place]
            if self._is_small(size):
                # It stays in the heap, and is counted elsewhere from now on.
                self._small -= size
                self._heap -= size
            else:
                self._large -= size
        else:
            weakref.finalize(storage, self._known.pop, place, None)
        self._known[place] = 0
        return storage.nbytes()

    def count(self, tensor: Tensor) -> None:
        """Count this tensor's memory, unless it is known already."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            return
        size = storage.nbytes()
        if self._is_small(size):
            self._small += size
            self._heap = max(self._heap, self._small)
        else:
            if self._cpu:
                size = -(-(size + _HEADER) // _PAGE) * _PAGE
            self._large += size
        self._known[place] = size
        self._high = max(self._high, self.now)
        weakref.finalize(storage, self._free, place)

    def _free(self, place: int) -> None:
        size = self._known.pop(place, 0)
        if self._is_small(size):
            self._small -= size
        else:
            self._large -= size

    def _is_small(self, size: int) -> bool:
        return self._cpu and size < _MAPPED

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        result = function(*args, **(kwargs or {}))
        if self._cpu:
            self._high = max(self._high, before + taken(function, args, result))
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
