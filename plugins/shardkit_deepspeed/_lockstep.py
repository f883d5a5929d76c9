"""Stage 3: ranks gather the same module's parameters, or say so before they gather another's."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, final

import torch
import torch.distributed as dist

from shardkit.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from torch import nn

_PATIENCE_SECONDS = 20


@final
class Lockstep:
    """Compares the order in which ranks run modules, at almost no cost once it is known.

    To gather is a collective that takes what the other ranks bring: were they at another module, of the same size, the
    weights would be mixed up silently. So the first time that a module follows another, all ranks compare. Where only
    one module has ever followed, that is expected and costs a look into a table; where several have, all ranks know
    that and compare again. A rank that leaves the expected path says so through the store, and goes on if all do.
    """

    def __init__(self, model: nn.Module, device: torch.device, number: int) -> None:
        # Number 0 is for what was added to the module since.
        self._names = ["a new module", *(name or type(model).__name__ for name, _ in model.named_modules())]
        self._numbers = {id(part): at + 1 for at, part in enumerate(model.modules())}
        self._holds = {id(part) for part in model.modules() if next(part.parameters(recurse=False), None) is not None}
        self._device = device
        self._followers: dict[int, set[int]] = {}
        self._last = 0
        self._departures = 0
        self._prefix = f"shardkit/lockstep/{number}"

    def enter(self, part: nn.Module, forward: bool) -> None:
        """Take note that this rank is about to gather the parameters of ``part``. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        if id(part) not in self._holds and not getattr(part, "_external_params", None):
            return
        place = self._numbers.get(id(part), 0) * 2 + forward
        followers = self._followers.get(self._last)
        if followers is None or len(followers) > 1:
            self._compare(place)
        elif place not in followers:
            self._depart(place)
        self._followers.setdefault(self._last, set()).add(place)
        self._last = place

    def _compare(self, place: int) -> None:
        told = torch.tensor([place, -place], device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        high, low = told.tolist()
        if high != -low:
            own = torch.tensor([place], device=self._device)
            every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            self._refuse({rank: int(value) for rank, value in enumerate(every)})

    def _depart(self, place: int) -> None:
        store = dist.PrefixStore(self._prefix, dist.distributed_c10d._get_default_store())
        keys = [f"{self._departures}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], str(place))
        try:
            store.wait(keys, timedelta(seconds=_PATIENCE_SECONDS))
        except dist.DistStoreError:
            # The others went on as expected, and wait in a collective for this rank.
            self._refuse({dist.get_rank(): place})
        places = [int(store.get(key)) for key in keys]
        if set(places) != {place}:
            self._refuse(dict(enumerate(places)))
        self._departures += 1

    def _refuse(self, places: dict[int, int]) -> NoReturn:
        parted = ", ".join(f"rank {rank} at {self._names[place // 2]!r}" for rank, place in places.items())
        raise UnsupportedError(
            "backend 'deepspeed' at stage 3 gathers parameters as modules run, so every rank must run the same modules "
            f"in the same order, and the ranks parted ({parted}): evaluate within session.evaluate(), or use "
            "deepspeed:stage=2 or ddp, where ranks may differ"
        )


@final
class Meeting:
    """Has the ranks wait for each other before a call that gathers, and end the wait where one doesn't come."""

    def __init__(self, number: int) -> None:
        self._prefix = f"shardkit/meeting/{number}"
        self._meetings = 0

    def meet(self, what: str) -> None:
        """Wait until every rank is here. Collective.

        Raises:
            StateError: a rank didn't come.
        """
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return
        store = dist.PrefixStore(self._prefix, dist.distributed_c10d._get_default_store())
        keys = [f"{self._meetings}/{other}" for other in range(size)]
        store.set(keys[rank], "here")
        try:
            store.wait(keys, timedelta(seconds=_PATIENCE_SECONDS))
        except dist.DistStoreError:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            store.delete_key(keys[rank])
            raise StateError(
                f"backend 'deepspeed' at stage 3 gathers the weights in {what}, which is collective: call it on all "
                f"ranks. Rank {rank} waited {_PATIENCE_SECONDS} s for rank {', '.join(missing)} of {size}; under "
                "deepspeed:stage=2 or ddp it waits for nobody"
            ) from None
        self._meetings += 1
