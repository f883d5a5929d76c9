"""What the engines hold in memory beside activations, known without DeepSpeed: for ``shardkit plan``."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from shardkit import Footprint, ModelSize, Stepped, Strategy
from shardkit_deepspeed._plan import Plan, make_plan

if TYPE_CHECKING:
    from shardkit import ParameterSize
    from shardkit_deepspeed._options import DeepSpeedOptions

_FLOAT = 4
_HALF = 2
_RING = 2 * 2**20
"""Bytes that gloo takes to sum: two pieces of a message, of 1 MiB each (measured, torch 2.13)."""

_RECORDS = 64 * 2**10
"""Bytes of Python's objects by which stage 3 knows a parameter: its hooks, and those of the modules around it (of
t5-tiny's 51 parameters 3.3 MiB more than in stage 0, by tracemalloc; DeepSpeed 0.19.8, Python 3.11)."""


def footprint(model: ModelSize, strategy: Strategy, options: DeepSpeedOptions) -> Footprint:
    """Return the footprint of the engine that the strategy and the options ask for.

    Raises:
        StrategyError: as at ``prepare``.
    """
    elements = sum(value.elements for value in model.parameters if value.trainable)
    plan = make_plan(strategy, options, elements=elements, world_size=model.world_size, device=model.device)
    if plan.stage == 0:
        return ReplicatedFootprint(model, plan=plan)
    return Stage3Footprint(model, plan=plan) if plan.stage == 3 else PartitionFootprint(model, plan=plan)


@dataclass
class ZeroFootprint(Footprint):
    """What the stages share: gradients that come, go into a bucket, and are averaged.

    A method marks its peaks as it goes, and returns how far they are above what it leaves.
    """

    plan: Plan = field(kw_only=True)

    def __post_init__(self) -> None:
        self._zero = self.plan.config["zero_optimization"]
        self._ranks = self.model.world_size
        self._gloo = self.model.device == "cpu"
        self._ring = _RING if self._gloo and self._ranks > 1 else 0
        self._half = self.plan.half is not None
        self.weights = None if self.plan.half is None else "bf16" if self.plan.half == "bf16" else "fp16"
        self._trained = {
            value.name: value for value in self.model.parameters if value.trainable and value.updated and value.elements
        }
        self._largest = max((value.elements for value in self._trained.values()), default=0)
        self._offload = self._zero["offload_optimizer"]["device"] == "cpu"
        self.offloaded_state = self._offload
        # Whole gradients, those within the bucket apart.
        self._whole: dict[str, int] = {}
        self._kept = 0
        self._others = 0
        self._bucket: list[str] = []
        self._filled = 0
        self._coming = set(self._trained)
        # Those of which there is an averaged gradient in this window.
        self._known: set[str] = set()
        self._peak = 0
        self._begin()
        self._mark()

    # What differs among the stages.

    @abstractmethod
    def _begin(self) -> None:
        """Fill ``held`` and ``host`` with what is there between two windows."""

    @abstractmethod
    def _came(self, name: str, *, last: bool) -> None:
        """Take in the whole gradient of a trained parameter."""

    @abstractmethod
    def _finish(self, *, last: bool) -> None:
        """End a backward; those in ``_coming`` got no gradient."""

    @abstractmethod
    def _update(self) -> None:
        """Update the weights, and what follows; the gradients are gone."""

    # The window.

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        if name not in self._trained:
            # No optimizer holds it: dropped when the window ends.
            self._others += nbytes
            self._mark()
            return 0
        self._peak = 0
        self._came(name, last=last)
        self._coming.discard(name)
        if not self._coming:
            self._end(last=last)
        return self._passing()

    def step(self) -> int:
        self._peak = 0
        if len(self._coming) < len(self._trained):
            self._end(last=True)
        self._whole.clear()
        self._known.clear()
        self._others = self._kept = 0
        self._mark()
        self._update()
        return self._passing()

    def _end(self, *, last: bool) -> None:
        self._finish(last=last)
        self._coming = set(self._trained)

    @property
    def _away(self) -> bool:
        """Whether what is offloaded is in another memory."""
        return self._offload and not self._gloo

    def _beyond(self, most: int) -> int:
        """Return how far so many bytes are beyond what is held in this memory."""
        return max(0, most - self.held.total - (self.host.total if self._gloo else 0))

    def _mark(self, passing: int = 0) -> None:
        """Take note of what is held now, with so much beside it."""
        self.held.gradients = self._resident() + sum(self._whole.values()) + self._others + self._kept
        self._peak = max(self._peak, self.held.total + passing)

    def _resident(self) -> int:
        """Return the bytes of gradients that are held also while there are none."""
        return 0

    def _passing(self) -> int:
        self._mark()
        return self._peak - self.held.total

    def _weights(self, values: Iterable[ParameterSize]) -> int:
        """Return the bytes of parameters as they are on the rank when they are whole."""
        return sum(value.elements * (_HALF if self._half else value.itemsize) for value in values)


@dataclass
class ReplicatedFootprint(ZeroFootprint):
    """Stage 0: everything is whole. Gradients are averaged in copies of a bucket, at the end of a window."""

    def _begin(self) -> None:
        self.held.parameters = self._weights(self.model.parameters)

    def stepped(self) -> Sequence[Stepped]:
        return [Stepped(value.shape, name) for name, value in self._trained.items()]

    def _came(self, name: str, *, last: bool) -> None:
        self._whole[name] = self._trained[name].nbytes
        self._mark()

    def _finish(self, *, last: bool) -> None:
        if not last or self._ranks == 1:
            return
        # A parameter without a gradient is given zeros, which go again if it got none anywhere.
        absent = sum(self._trained[name].nbytes for name in self._coming)
        elements = size = count = 0
        for value in self._trained.values():
            elements, size, count = elements + value.elements, size + value.nbytes, count + 1
            if elements > self.plan.bucket_size:
                self._mark(absent + (size if count > 1 else 0) + self._ring)
                elements = size = count = 0
        # The last holds a tensor more, which says what got a gradient.
        self._mark(absent + size + self._ring)

    def _update(self) -> None:
        pass


@dataclass
class PartitionFootprint(ZeroFootprint):
    """Stages 1 and 2: weights are whole, in one flat tensor of which each rank updates an equal part.

    Each parameter group has a flat tensor of its own; here they are taken for one.
    """

    def _begin(self) -> None:
        values = list(self._trained.values())
        if self._zero["round_robin_gradients"]:
            values = [value for rank in range(self._ranks) for value in values[rank :: self._ranks]]
        self._order = values
        elements = sum(value.elements for value in values)
        self._part = math.ceil(elements / (2 * self._ranks)) * 2
        self._spans = dict(zip((value.name for value in values), self._cut(values), strict=True))
        self._on: dict[int, int] = {}
        self._opened = False
        self._weight = _HALF if self._half else _FLOAT
        padding = self._part * self._ranks - elements
        self.held.parameters = self._weights(self.model.parameters) + padding * self._weight
        # Masters are the weights' own memory where they can be, and gradients are then kept by fragments.
        self._aliased = not self._half and (self._gloo or not self._offload)
        if self._aliased:
            return
        place = self.host if self._offload else self.held
        place.optimizer = self._part * _FLOAT
        if self._offload:
            # The masters' gradients, weights on their way, and a gradient on its way at either end.
            place.gradients = self._part * _FLOAT
            place.buffers = (self._part + self._largest) * self._weight
            self.held.buffers = self._largest * self._weight

    def _cut(self, values: Iterable[ParameterSize]) -> Iterator[list[tuple[int, int]]]:
        """Yield what of each parameter is where: pairs of a rank and a number of elements."""
        offset = 0
        for value in values:
            end, span = offset + value.elements, []
            while offset < end:
                rank = offset // self._part
                size = min(end, (rank + 1) * self._part) - offset
                span.append((rank, size))
                offset += size
            yield span

    def stepped(self) -> Sequence[Stepped]:
        pieces = [(size, rank, value.name) for value in self._order for rank, size in self._spans[value.name]]
        # All ranks hold as much; where the largest piece is, the optimizer takes most in passing.
        fullest = max(pieces, default=(0, 0, ""))[1]
        return [Stepped((size,), name) for size, rank, name in pieces if rank == fullest]

    def prepare(self) -> int:
        before = sum(value.nbytes for value in self.model.parameters) if self._half else 0
        flat, masters = self._part * self._ranks * self._weight, self._part * _FLOAT
        # The weights are copied into the flat tensor; then come masters with gradients. A cast keeps what was before.
        most = before + self._weights(self.model.parameters) + max(flat, 0 if self._away else 2 * masters)
        return self._beyond(most)

    def _came(self, name: str, *, last: bool) -> None:
        size = self._trained[name].elements
        # Half-precision ones are added up in float32 beside them.
        self._mark(size * self._weight)
        self._whole[name] = size * _FLOAT
        self._mark(size * self._weight if self._half else 0)
        if self.plan.stage == 2:
            self._open()
            self._release(name)

    def _finish(self, *, last: bool) -> None:
        if self.plan.stage == 1 and not last:
            return
        self._open()
        late = self._trained if self.plan.stage == 1 else [name for name in self._trained if name in self._coming]
        for name in late:
            self._whole.setdefault(name, self._trained[name].elements * _FLOAT)
            self._mark()
            self._release(name)
        self._reduce()
        self.held.buffers -= self._buffer
        self._opened = False

    def _open(self) -> None:
        """Have a buffer for the bucket."""
        if not self._opened:
            self._opened = True
            self.held.buffers += self._buffer
            self._mark()

    @property
    def _copied(self) -> bool:
        return bool(self._zero["contiguous_gradients"]) or self._offload

    @property
    def _buffer(self) -> int:
        count = 2 if self._zero["overlap_comm"] else 1
        return count * self.plan.bucket_size * _FLOAT if self._copied else 0

    def _release(self, name: str) -> None:
        """Put a gradient into the bucket, which is averaged first if there is no room."""
        size = self._trained[name].elements
        if self._filled + size > self.plan.bucket_size:
            self._reduce()
        if self._copied and size <= self.plan.bucket_size:
            self._whole.pop(name)
        self._bucket.append(name)
        self._filled += size
        self._mark()

    def _reduce(self) -> None:
        """Average what is in the bucket, and keep each rank's own part of it."""
        ranks = [rank for name in self._bucket for rank, _ in self._spans[name]]
        # Neighbours that go to one rank are one piece; several are put together in a copy, unless all is summed.
        pieces = 1 + sum(one != other for one, other in pairwise(ranks))
        copied = pieces > 1 and self._zero["reduce_scatter"]
        self._mark((self._filled * _FLOAT if copied else 0) + self._ring)
        if len(self._bucket) == 1 and pieces == 1:
            # Kept as it is, if it isn't in the buffer.
            self._whole.pop(self._bucket[0], 0)
        for name in self._bucket:
            self._keep(name)
        for name in self._bucket:
            self._whole.pop(name, 0)
        self._bucket, self._filled = [], 0
        self._mark()

    def _keep(self, name: str) -> None:
        if name in self._known:
            # Added to those of an earlier micro-batch.
            return
        self._known.add(name)
        for rank, size in self._spans[name]:
            self._on[rank] = self._on.get(rank, 0) + size * _FLOAT
            # Ranks have theirs at different moments: the most that any has.
            self._kept = max(self._kept, self._on[rank])
        if not self._aliased:
            # One tensor for all; with offload it is in ``host`` already.
            self._kept = 0 if self._offload else self._part * _FLOAT
        self._mark()

    def _update(self) -> None:
        self._on.clear()
        # Gloo receives into memory of its own.
        gathered = min(self._zero["allgather_bucket_size"], self._part * self._ranks) * self._weight
        self._mark(gathered if self._gloo and self._ranks > 1 else 0)


@dataclass
class Stage3Footprint(ZeroFootprint):
    """Stage 3: a shard of each parameter, which is whole while its module runs."""

    def _begin(self) -> None:
        self._sizes = {value.name: value for value in self.model.parameters}
        self._shards = {name: math.ceil(value.elements / self._ranks) for name, value in self._sizes.items()}
        self._part = sum(self._shards[name] for name in self._trained)
        self._gathered: dict[str, int] = {}
        away = self._zero["offload_param"]["device"] == "cpu"
        shards = sum(size * self._itemsize(name) for name, size in self._shards.items())
        (self.host if away else self.held).parameters = shards
        threshold = self._zero["stage3_param_persistence_threshold"]
        self._persistent = {name for name, value in self._sizes.items() if value.elements <= threshold}
        self.held.parameters += sum(self._full(name) for name in self._persistent)
        # As in the engine: gradients come and go where masters are the weights' own memory, on the device.
        self._comes_and_goes = not self._half and (self._gloo or not (self._offload or away))
        aliased = not self._half and (self._gloo or self._offload == away)
        place = self.host if self._offload else self.held
        if not aliased:
            place.optimizer = self._part * _FLOAT
        if not self._comes_and_goes and self._offload:
            # DeepSpeed holds them twice there.
            place.gradients = 2 * self._part * _FLOAT
        if self._zero["contiguous_gradients"]:
            self.held.buffers = self.plan.bucket_size * _FLOAT
        if self._gloo:
            # On another device they are in its host's memory, as all that a program needs for itself.
            self.held.buffers += _RECORDS * len(self._sizes)

    def _resident(self) -> int:
        return 0 if self._comes_and_goes or self._offload else self._part * _FLOAT

    def _itemsize(self, name: str) -> int:
        return _HALF if self._half else self._sizes[name].itemsize

    def _full(self, name: str) -> int:
        """Return the bytes of a gathered parameter."""
        return self._shards[name] * self._ranks * self._itemsize(name)

    def stepped(self) -> Sequence[Stepped]:
        return [Stepped((self._shards[name],), name) for name in self._trained]

    def prepare(self) -> int:
        whole = sum(value.nbytes for value in self.model.parameters)
        # The shards in one tensor, a copy of them for the masters, and a place for gradients; with offload another.
        copies = 0 if self._away else 4 if self._offload else 3
        most = max(whole + (self._weights(self.model.parameters) if self._half else 0), copies * self._part * _FLOAT)
        return self._beyond(most)

    # Gathered parameters.

    def forward(self, names: Sequence[str]) -> int:
        return self._gather(names)

    def backward(self, names: Sequence[str]) -> int:
        return self._gather(names)

    def _gather(self, names: Sequence[str]) -> int:
        wanted = [name for name in names if name not in self._persistent]
        self._peak = 0
        self._let_go(wanted)
        missing = {name: self._full(name) for name in wanted if name not in self._gathered}
        size = sum(missing.values())
        self._gathered |= missing
        self.held.parameters += size
        # Several are received as one, of which each is copied; gloo receives into memory of its own.
        copied = size if (len(missing) > 1 or self._gloo) and self._ranks > 1 else 0
        self._mark(copied + (self._ahead() if size else 0))
        return self._passing()

    def _let_go(self, wanted: Sequence[str]) -> None:
        """Shard those that aren't wanted, but for as many as are kept for their next use."""
        kept = self._zero["stage3_max_live_parameters"] if self._zero["stage3_max_reuse_distance"] else 0
        live = sum(self._sizes[name].elements for name in self._gathered)
        for name in list(self._gathered):
            if live > kept and name not in wanted:
                live -= self._sizes[name].elements
                self.held.parameters -= self._gathered.pop(name)

    def _ahead(self) -> int:
        """Return the bytes of what is gathered before it is used."""
        elements = sum(value.elements for value in self.model.parameters)
        ahead: int = self._zero["stage3_prefetch_bucket_size"]
        return min(ahead, elements) * (_HALF if self._half else _FLOAT)

    # Gradients.

    def _came(self, name: str, *, last: bool) -> None:
        size = self._trained[name].elements
        self._whole[name] = size * self._itemsize(name)
        self._mark()
        if self._filled and self._filled + size > self.plan.bucket_size:
            self._reduce()
        if self._zero["contiguous_gradients"] and size <= self.plan.bucket_size:
            self._whole.pop(name)
        self._bucket.append(name)
        self._filled += size
        self._mark()

    def _finish(self, *, last: bool) -> None:
        for name in [name for name in self._trained if name in self._coming]:
            self._came(name, last=last)
        self._reduce()

    def _reduce(self) -> None:
        """Average what is in the bucket, and keep the shards of it."""
        even = len(self._bucket) == 1 and self._filled % self._ranks == 0
        # Put in the order of ranks, in a copy; half-precision ones are made float32 before that.
        copied = sum(self._shards[name] for name in self._bucket) * self._ranks * _FLOAT
        self._mark((0 if even else copied) + (self._filled * _FLOAT if self._half else 0) + self._ring)
        for name in self._bucket:
            self._keep(name)
        self._mark(0 if even else copied)
        for name in self._bucket:
            self._whole.pop(name, 0)
        self._bucket, self._filled = [], 0
        self._mark()

    def _keep(self, name: str) -> None:
        if self._comes_and_goes and name not in self._known:
            self._known.add(name)
            self._kept += self._shards[name] * _FLOAT

    def _update(self) -> None:
        self.held.parameters -= sum(self._gathered.values())
        self._gathered.clear()
        if not self._comes_and_goes and not self._offload:
            # Copied for the step, as many as are updated at a time.
            self._mark(min(self._zero["sub_group_size"] + self._largest // self._ranks, self._part) * _FLOAT)
        whole = sum(self._full(name) for name in self._persistent)
        self._mark(whole if self._gloo else 0)
