"""Stage 3: a rank that waits for the others learns when one of them has gone another way, and all say so together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError

_LOOK = timedelta(seconds=1)
_TALK = timedelta(seconds=20)

_issued = 0
_passed = 0
_broken: weakref.ref[Any] | None = None
_here = ""


def broken() -> bool:
    """Return whether ranks have parted in the midst of a collective, so that no further one can be relied on."""
    return _broken is not None and _broken() is dist.distributed_c10d._get_default_group()


def now_at(name: str) -> None:
    """Take note of where this rank is, for the others to hear if it waits in vain."""
    global _here
    _here = name


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of torch's collectives, whose wait ends with an error when a rank doesn't come to it."""

    def call(*arguments: Any, async_op: bool = False, **settings: Any) -> Any:
        global _issued
        _issued += 1
        handle = _Watched(function(*arguments, async_op=True, **settings), _issued)
        return handle if async_op else handle.wait()

    return call


class _Watched:
    """A handle to a collective, and its number among all that this rank has started."""

    def __init__(self, work: Any, number: int) -> None:
        self._work = work
        self._number = number

    def wait(self, *_: Any) -> Any:
        return _patient(self._work, lambda: _hear(self._number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _patient(work: Any, look: Callable[[], None]) -> Any:
    if work is None:
        return None
    while True:
        try:
            return work.wait(_LOOK)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
        look()


def _keys() -> tuple[Any, list[str]]:
    store = dist.PrefixStore("shardkit/deepspeed/gate", dist.distributed_c10d._get_default_store())
    return store, [f"{_passed}/{rank}" for rank in range(dist.get_world_size())]


def _hear(number: int) -> None:
    """Look whether another rank waits at a gate, and never came to the collective of this number."""
    store, keys = _keys()
    for key in keys:
        if store.check([key]):
            issued, _, _ = store.get(key).decode().split("|", 2)
            if int(issued) < number:
                store.set(keys[dist.get_rank()], f"{issued}|blocked|{_here}")
                _part(store, keys)


def gate(place: int, name: str, group: Any) -> list[int] | None:
    """Wait until all ranks are at a gate; return where each is if they differ, else None. Collective.

    Raises:
        UnsupportedError: another rank didn't come to a gate, and waits for this one in a collective.
    """
    global _passed
    store, keys = _keys()
    own = keys[dist.get_rank()]
    announced = False

    def look() -> None:
        nonlocal announced
        if not announced:
            # Only now: in ordinary times nobody waits as long.
            store.set(own, f"{_issued}|waits|{name}")
            announced = True
        if any(store.check([key]) and b"|blocked|" in store.get(key) for key in keys):
            _part(store, keys)

    told = torch.tensor([place, -place])
    _patient(dist.all_reduce(told, dist.ReduceOp.MAX, group=group, async_op=True), look)
    high, low = told.tolist()
    found = None
    if high != -low:
        every = [torch.zeros_like(told) for _ in keys]
        dist.all_gather(every, torch.tensor([place, -place]), group=group)
        found = [int(other[0]) for other in every]
    _passed += 1
    if announced:
        store.delete_key(own)
    return found


def _part(store: Any, keys: list[str]) -> NoReturn:
    global _broken, _issued, _passed
    try:
        store.wait(keys, _TALK)
    except dist.DistStoreError:
        # A rank that still computes will find the others gone.
        keys = [key for key in keys if store.check([key])]
    told = [store.get(key).decode().split("|", 2) for key in keys]
    _broken = weakref.ref(dist.distributed_c10d._get_default_group())
    _issued = int(told[0][0])
    _passed += 1
    refuse([name for _, _, name in told])


def refuse(places: list[str]) -> NoReturn:
    """Say where each rank is.

    Raises:
        UnsupportedError: the same on every rank.
    """
    parted = ", ".join(f"rank {rank} at {name}" for rank, name in enumerate(places))
    raise UnsupportedError(
        "backend 'deepspeed' at stage 3 gathers parameters as modules run, so every rank must run the same modules "
        f"in the same order, and the ranks parted ({parted}): evaluate within session.evaluate(), or use "
        "deepspeed:stage=2 or ddp, where ranks may differ"
    )
