"""What engines share that gather parameters as modules run: ranks do the same in the same order, or hear that not."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

_LOOK = timedelta(seconds=1)
_TALK = timedelta(seconds=20)
_END = -1


class Words(NamedTuple):
    """How an error speaks of a backend: its ``name`` as the begin of a sentence, and which strategy to use
    ``instead``."""

    name: str
    instead: str


# How many collectives of each kind this rank has started, each kind on a process group of its own.
_started = {"gather": 0, "reduce": 0, "gate": 0}
_broken: weakref.ref[Any] | None = None
_here = ""
_words = Words("this backend", "another one")
_reductions: dict[Any, Any] = {}
_rounds = 0


@final
class Lockstep:
    """Compares the order in which ranks come to places, such as modules to gather, at almost no cost once it is known.

    To gather is a collective that takes what the other ranks bring: were they at another module, of the same size, the
    weights would be mixed up silently. So the first time that a place follows another, or that a backward ends after
    it, all ranks meet at a gate. Where only one has ever followed, that is expected and costs a look into a table;
    where several have, all ranks know that and meet again. A rank that leaves the expected path comes to a gate where
    the others don't: they wait for it in a collective, look whether it stands at a gate, and let it know. For that
    their collectives must be :func:`watched` gathers and those of :func:`reduce_scatter`.

    ``names`` are those of the places, which go by their numbers in it; above the lower 32 bits a number may say more of
    what is done there. To make one is collective.
    """

    def __init__(self, names: Sequence[str], words: Words) -> None:
        self._names = list(names)
        self._words = words
        self._followers: dict[int, set[int]] = {}
        self._last = _END
        self._parted: list[int] | None = None
        # Of its own: where ranks part, what they say of it meets no other collective.
        self._group = dist.new_group(backend="gloo")
        if dist.get_backend() == "gloo":
            _open_reductions()

    def enter(self, place: int) -> None:
        """Take note that this rank is about to do what is done at a place. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        global _here, _words
        _here, _words = self._name(place), self._words
        followers = self._followers.get(self._last, ())
        if self._parted is None and (len(followers) != 1 or place not in followers):
            self._parted = _gate(place, self._group)
            if self._parted is None:
                self._followers.setdefault(self._last, set()).add(place)
        if self._parted is not None:
            _refuse([self._name(other) for other in self._parted])
        self._last = place

    def end(self) -> None:
        """Take note that this rank's backward is about to end. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        self.enter(_END)

    def restart(self) -> None:
        """Forget the passes in progress, on all ranks."""
        self._last, self._parted = _END, None

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def _name(self, place: int) -> str:
        return "the end of its backward" if place == _END else self._names[place % 2**32]


def broken() -> bool:
    """Return whether ranks have parted in the midst of a collective, so that no further one can be relied on."""
    return _broken is not None and _broken() is dist.distributed_c10d._get_default_group()


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
    return _reduced(output, given if within else given.clone(), op, group, async_op)


def reduce_scatter_in_place(output: Tensor, given: Tensor, op: Any, group: Any = None, async_op: bool = False) -> Any:
    """Do as :func:`reduce_scatter` where what is given may be overwritten, which saves a copy."""
    return _reduced(output, given, op, group, async_op)


def _reduced(output: Tensor, whole: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    current = dist.distributed_c10d._get_default_group()
    if current in _reductions and dist.get_world_size(group) == dist.get_world_size():
        group = _reductions[current]
    _started["reduce"] += 1

    def keep() -> None:
        output.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(output))

    handle = _Watched(dist.all_reduce(whole, op, group=group, async_op=True), "reduce", keep)
    return handle if async_op else handle.wait()


def _open_reductions() -> None:
    """Give reductions a process group of their own: where ranks part, one must not meet a gather. Collective."""
    current = dist.distributed_c10d._get_default_group()
    if current not in _reductions:
        _reductions.clear()
        _reductions[current] = dist.new_group(backend="gloo")


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
    store = dist.PrefixStore("shardkit/lockstep/waits", dist.distributed_c10d._get_default_store())
    keys = [f"{_rounds}/{rank}" for rank in range(dist.get_world_size())]
    own = {"kind": kind, "number": number, "started": _started, "at": _here}
    store.set(keys[dist.get_rank()], json.dumps(own))
    for key in keys:
        if store.check([key]):
            other = json.loads(store.get(key))
            if other["started"][kind] < number and _started[other["kind"]] < other["number"]:
                _part(store, keys)


def _gate(place: int, group: Any) -> list[int] | None:
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
            f"{_words.name} averages gradients while modules gather their parameters, and gradients of "
            "one module came on some ranks only, or in another order (a parameter that its module uses on some ranks "
            f"only): use {_words.instead}, where ranks may differ"
        )
    _refuse([other["at"] for other in told])


def _refuse(places: list[str]) -> NoReturn:
    """Say where each rank is.

    Raises:
        UnsupportedError: the same on every rank.
    """
    parted = ", ".join(f"rank {rank} at {name}" for rank, name in enumerate(places))
    raise UnsupportedError(
        f"{_words.name} gathers parameters as modules run, so every rank must run the same modules "
        f"in the same order, and the ranks parted ({parted}): evaluate within session.evaluate(), or use "
        f"{_words.instead}, where ranks may differ"
    )
