"""Stage 3: calls that gather, such as a load, end where a rank doesn't come to them."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import final

import torch.distributed as dist

from shardkit.errors import StateError

_PATIENCE_SECONDS = 20

_numbers = itertools.count()


@final
class Meeting:
    """Has the ranks wait for each other before a call that gathers, and end the wait where one doesn't come."""

    def __init__(self) -> None:
        self._prefix = f"shardkit/meeting/{next(_numbers)}"
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
