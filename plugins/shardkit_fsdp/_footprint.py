"""What the fullest rank holds under fully_shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, final

from shardkit import Footprint, ModelSize, Stepped

if TYPE_CHECKING:
    from shardkit import ParameterSize
    from shardkit_fsdp._options import FSDPOptions

_SCRATCH = 2 * 2**20
"""What gloo takes for itself in an all-reduce, at most: two pieces of 1 MiB. Measured with torch 2.13."""

ROOT = ""


@final
class FSDPFootprint(Footprint):
    """A shard of everything, and of one block at a time the whole, beside what no block holds.

    Blocks are told by the names of the parameters, since the modules aren't known here.
    """

    def __init__(self, model: ModelSize, options: FSDPOptions) -> None:
        super().__init__(model)
        self._ranks = model.world_size
        self._sizes = {value.name: value for value in model.parameters}
        self._unit = unit_names([value.name for value in model.parameters], options.wrap)
        self._members: dict[str, list[str]] = {}
        for name, unit in self._unit.items():
            self._members.setdefault(unit, []).append(name)
        self._stays = options.reshard_after_forward is False
        self._root_stays = options.reshard_after_forward is not True
        self._low = options.gather == "low"
        away = options.offload == "cpu"
        self.offloaded_state = away
        self._place = self.host if away else self.held
        self._place.parameters = sum(map(self._shard, self._sizes.values()))
        self._gathered: set[str] = set()
        self._coming: dict[str, set[str]] = {}
        self._whole: dict[str, int] = {}
        self._kept: set[str] = set()
        self._begin()

    def _shard(self, value: ParameterSize) -> int:
        """Return the bytes of a parameter's shard, with what pads it: rows are never cut."""
        rows = value.shape[0] if value.shape else 1
        return math.ceil(rows / self._ranks) * (value.elements // rows if rows else 0) * value.itemsize

    def _full(self, unit: str) -> int:
        """Return the bytes of a unit that is gathered."""
        return self._ranks * sum(map(self._passing, map(self._sizes.__getitem__, self._members[unit])))

    def _passing(self, value: ParameterSize) -> int:
        """Return the bytes of a shard as it is sent."""
        halved = self._low and value.itemsize == 4 and len(value.shape) > 1
        return self._shard(value) // 2 if halved else self._shard(value)

    def _begin(self) -> None:
        self._coming = {
            unit: trained
            for unit, names in self._members.items()
            if (trained := {name for name in names if self._sizes[name].trainable})
        }

    def stepped(self) -> Sequence[Stepped]:
        return [
            Stepped((self._shard(value) // value.itemsize,), value.name)
            for value in self.model.parameters
            if value.updated and value.trainable
        ]

    def prepare(self) -> int:
        whole = sum(value.nbytes for value in self.model.parameters)
        shards = sum(map(self._shard, self._sizes.values()))
        unit = max((sum(self._shard(self._sizes[n]) for n in names) for names in self._members.values()), default=0)
        largest = max((value.nbytes for value in self.model.parameters), default=0)
        # The first unit's shards and a place to gather one parameter, beside a model that is still whole.
        return max(0, whole + unit + largest - (0 if self.offloaded_state and self.model.device != "cpu" else shards))

    def forward(self, names: Sequence[str]) -> int:
        return self._gather(names, keep=self._stays)

    def backward(self, names: Sequence[str]) -> int:
        return self._gather(names, keep=False)

    def _gather(self, names: Sequence[str], *, keep: bool) -> int:
        wanted = {self._unit[name] for name in names}
        if ROOT in self._members and self._root_stays and (wanted or self._gathered):
            wanted.add(ROOT)
        if not keep:
            for unit in self._gathered - wanted:
                self._give_up(unit)
        missing = wanted - self._gathered
        size = sum(map(self._full, missing))
        self._gathered |= missing
        self.held.parameters += size
        # What comes from all ranks lies in one tensor, of which each parameter gets its own copy.
        return max(map(self._full, missing), default=0) if self._ranks > 1 else 0

    def _give_up(self, unit: str) -> None:
        self._gathered.discard(unit)
        self.held.parameters -= self._full(unit)

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        unit = self._unit[name]
        self._whole[name] = max(nbytes, self._sizes[name].nbytes)
        self.held.gradients += self._whole[name]
        coming = self._coming.get(unit, set())
        coming.discard(name)
        if coming:
            return 0
        # All of the unit's are there: averaged in one copy, of which the rank keeps its shards.
        if unit in self._gathered:
            self._give_up(unit)
        members = [member for member in self._members[unit] if self._sizes[member].trainable]
        before = self.held.gradients
        for member in members:
            self.held.gradients -= self._whole.pop(member, 0)
            if member not in self._kept:
                self._kept.add(member)
                self._place.gradients += self._shard(self._sizes[member])
        self._coming[unit] = set(members)
        parts = sum(self._shard(self._sizes[member]) for member in members)
        passing = parts * self._ranks + (min(_SCRATCH, parts * self._ranks) if self._ranks > 1 else 0)
        return before - self.held.gradients + passing

    def step(self) -> int:
        for unit in list(self._gathered):
            self._give_up(unit)
        self._place.gradients = 0
        self.held.gradients = 0
        self._kept.clear()
        self._whole.clear()
        self._begin()
        return 0


def unit_names(names: Iterable[str], wrap: str) -> dict[str, str]:
    """Return the unit of each parameter: the name of its block, or nothing where it is the root's."""
    names = list(names)
    if wrap == "none":
        return dict.fromkeys(names, ROOT)
    if wrap != "auto":
        found = {}
        for name in names:
            parts = name.split(".")[:-1]
            heads = [".".join(parts[: at + 1]) for at in range(len(parts))]
            found[name] = next((h for h in reversed(heads) if any(fnmatchcase(h, p) for p in wrap.split("|"))), ROOT)
        return found
    blocks: dict[str, dict[str, set[str]]] = {}
    for name in names:
        head, number, tail = _split(name)
        if number:
            blocks.setdefault(head, {}).setdefault(number, set()).add(tail)
    alike = {
        head
        for head, parts in blocks.items()
        # Of one class: the same names, but for what the first block has for all.
        if len(parts) > 1 and all(2 * len(tails & next(iter(parts.values()))) > len(tails) for tails in parts.values())
    }
    found = {}
    for name in names:
        head, number, _ = _split(name)
        found[name] = f"{head}{number}" if number and head in alike else ROOT
    return found


def _split(name: str) -> tuple[str, str, str]:
    """Return what is before a name's first number, the number, and what is behind it."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if at is None or at == len(parts) - 1:
        return name, "", ""
    return "".join(f"{part}." for part in parts[:at]), parts[at], ".".join(parts[at + 1 :])
