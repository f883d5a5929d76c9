"""Stage 3: a rank that waits for the others learns when one of them has gone another way, and all say so together."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

_LOOK = timedelta(seconds=1)
_TALK = timedelta(seconds=20)

# How many collectives of each kind this rank has started, each kind on a process group of its own.
_started = {"gather": 0, "reduce": 0, "gate": 0}
_broken: weakref.ref[Any] | None = None
_here = ""
_reductions: dict[Any, Any] = {}
_rounds = 0


def broken() -> bool:
    """Return whether ranks have parted in the midst of a collective, so that no further one can be relied on."""
    return _broken is not None and _broken() is dist.distributed_c10d._get_default_group()


def now_at(name: str) -> None:
    """Take note of where this rank is, for the others to hear if it waits in vain."""
    global _here
    _here = name


def open_reductions() -> None:
    """Give reductions a process group of their own: where ranks part, one must not meet a gather. Collective."""
    current = dist.distributed_c10d._get_default_group()
    if current not in _reductions:
        _reductions.clear()
        _reductions[current] = dist.new_group(backend="gloo")


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather of torch's, whose wait ends with an error when a rank doesn't come to it."""

    def gather(*arguments: Any, async_op: bool = False, **settings: Any) -> Any:
        _started["gather"] += 1
        handle = _Watched(function(*arguments, async_op=True, **settings), "gather")
        return handle if async_op else handle.wait()

    return gather


def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: Any = None, async_op: bool = False) -> Any:
    """Reduce as gloo's own does it: all to all, of which each rank keeps its part. Gloo's own can't be watched."""
    # Within what is reduced, the output overwrites it anyway.
    within = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    whole = given if within else given.clone()
    current = dist.distributed_c10d._get_default_group()
    if current in _reductions and dist.get_world_size(group) == dist.get_world_size():
        group = _reductions[current]
    _started["reduce"] += 1

    def keep() -> None:
        output.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(output))

    handle = _Watched(dist.all_reduce(whole, op, group=group, async_op=True), "reduce", keep)
    return handle if async_op else handle.wait()


class _Watched:
    """A handle to a collective, of a kind and with its number among those that this rank has started."""

    def __init__(self, work: Any, kind: str, then: Callable[[], None] | None = None) -> None:
        self._work = work
        self._then = then
        self._kind = kind
        self._number = _started[kind]

    def wait(self, *_: Any) -> None:
        while not self._ended():
            _look(self._kind, self._number)
        if self._then is not None:
            self._then()
            self._then = None

    def _ended(self) -> bool:
        try:
            if self._work is not None:
                self._work.wait(_LOOK)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _look(kind: str, number: int) -> None:
    """Tell the others what this rank waits in, and raise if one of them waits for it in something else.

    That is certain where neither has started what the other waits in, also if what it tells is old: had it gone on, so
    would this rank have come to it.
    """
    store = dist.PrefixStore("shardkit/deepspeed/waits", dist.distributed_c10d._get_default_store())
    keys = [f"{_rounds}/{rank}" for rank in range(dist.get_world_size())]
    own = {"kind": kind, "number": number, "started": _started, "at": _here}
    store.set(keys[dist.get_rank()], json.dumps(own))
    for key in keys:
        if store.check([key]):
            other = json.loads(store.get(key))
            if other["started"][kind] < number and _started[other["kind"]] < other["number"]:
                _part(store, keys)


def gate(place: int, group: Any) -> list[int] | None:
    """Wait until all ranks are at a gate; return where each is if they differ, else None. Collective.

    Raises:
        UnsupportedError: another rank didn't come to a gate, and waits for this one in a collective.
    """
    told = torch.tensor([place, -place])
    _started["gate"] += 1
    _Watched(dist.all_reduce(told, dist.ReduceOp.MAX, group=group, async_op=True), "gate").wait()
    high, low = told.tolist()
    if high == -low:
        return None
    every = [torch.zeros_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([place, -place]), group=group)
    return [int(other[0]) for other in every]


def _part(store: Any, keys: list[str]) -> NoReturn:
    global _broken, _rounds
    # No rank leaves before the others have heard.
    store.set(f"{keys[dist.get_rank()]}/heard", "")
    try:
        store.wait([*keys, *(f"{key}/heard" for key in keys)], _TALK)
    except dist.DistStoreError:
        # A rank that still computes will find the others gone.
        keys = [key for key in keys if store.check([key])]
    told = [json.loads(store.get(key)) for key in keys]
    _broken = weakref.ref(dist.distributed_c10d._get_default_group())
    _started.update(dict.fromkeys(_started, 0))
    _rounds += 1
    if any(other["kind"] == "reduce" for other in told):
        raise UnsupportedError(
            "backend 'deepspeed' at stage 3 averages gradients while modules gather their parameters, and gradients of "
            "one module came on some ranks only, or in another order (a parameter that its module uses on some ranks "
            "only): use deepspeed:stage=2 or ddp, where ranks may differ"
        )
    refuse([other["at"] for other in told])


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
