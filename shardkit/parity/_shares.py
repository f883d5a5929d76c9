"""Which part of each weight a rank sketches: all of it where the module holds it whole, else what no other one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor, nn

from shardkit.errors import TraceError, UnsupportedError
from shardkit.parity._sketch import Run, Sketcher

if TYPE_CHECKING:
    from shardkit._session import Session


class _Run(NamedTuple):
    """Elements that this rank holds of a parameter, and which of them it sketches."""

    name: str
    shard: int
    """Which of the engine's shards they are in, and from where to where in it."""
    begin: int
    end: int
    start: int
    """The place of the first in the whole parameter."""


def own_module(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return the user's module of what the backend has the user call, which may be a wrapper around it."""
    for module in model.modules():
        if [name for name, _ in module.named_parameters()] == list(shapes):
            return module
    raise TraceError(f"the backend's {type(model).__name__} doesn't hold the module's parameters under their names")


def _elements(value: nn.Parameter) -> int:
    """Return how many elements of a parameter the module itself holds.

    It is none where the backend refuses to show them, and of torch's DTensor, whose size is that of all ranks' parts.
    """
    if hasattr(value, "to_local"):
        return 0
    try:
        return value.detach().reshape(-1).numel()
    except UnsupportedError:
        return 0


@final
class Shares:
    """This rank's part in the sketches of all weights. To make it is collective."""

    def __init__(self, session: Session, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._engine = session._engine
        self._numel = {name: math.prod(shape) for name, shape in shapes.items()}
        self._module = own_module(self._engine.model, shapes)
        held = {name: _elements(value) for name, value in self._module.named_parameters()}
        here = {name for name, numel in self._numel.items() if held[name] == numel}
        told = session._processes.agree(here)
        whole = set.intersection(*told)
        self.apart = [place for place, name in enumerate(shapes) if name not in whole]
        """The places of the parameters whose sketch is the sum of all ranks' parts."""
        self._whole = whole
        self.parts = bool(self.apart) or not self._engine.whole_gradients
        """Whether any sketch is the sum of the ranks' parts."""
        self._sketchers: dict[Any, Sketcher] = {}
        self._runs = self._assigned(session) if self.apart else []

    def gradients(self) -> dict[str, Tensor]:
        """Return the sketch of each gradient, or of this rank's part of it, by name. Collective."""
        engine = self._engine
        if engine.whole_gradients:
            held = {name: value.grad for name, value in self._module.named_parameters()}
            return self._sketched([(name, 0, value.to_dense()) for name, value in held.items() if value is not None])
        return self._sketched([(name, start, values) for name, start, values, _ in engine.gradient_shards()])

    def weights(self) -> dict[str, Tensor]:
        """Return the sketch of each weight, or of this rank's part of it, by name."""
        shards = self._engine.weight_shards() if self._runs else []
        parts = [(run.name, run.start, shards[run.shard].values.reshape(-1)[run.begin : run.end]) for run in self._runs]
        values = self._module.named_parameters()
        return self._sketched([*((name, 0, value) for name, value in values if name in self._whole), *parts])

    def _sketched(self, parts: list[tuple[str, int, Tensor]]) -> dict[str, Tensor]:
        """Return the sketches of runs, each told by its parameter and the place of its first element, added up."""
        if not parts:
            return {}
        key = tuple((name, start, values.numel(), values.device) for name, start, values in parts)
        if key not in self._sketchers:
            runs = [Run(start, values.numel(), self._numel[name]) for name, start, values in parts]
            self._sketchers[key] = Sketcher(runs, parts[0][2].device)
        rows = self._sketchers[key]([values for _, _, values in parts]).cpu()
        found: dict[str, Tensor] = {}
        for (name, *_), row in zip(parts, rows, strict=True):
            found[name] = found[name] + row if name in found else row
        return found

    def _assigned(self, session: Session) -> list[_Run]:
        """Return the runs that this rank sketches: of what several hold, the first of them in order of rank."""
        own = [(shard.name, shard.start, shard.values.numel()) for shard in self._engine.weight_shards()]
        covered = dict.fromkeys(self._numel, 0)
        runs = []
        everybody = [
            (name, start, numel, rank, at)
            for rank, told in enumerate(session._processes.agree(own))
            for at, (name, start, numel) in enumerate(told)
            if name not in self._whole
        ]
        for name, start, numel, rank, at in sorted(everybody, key=lambda shard: shard[1]):
            begin = max(covered[name], start)
            if begin < start + numel:
                covered[name] = start + numel
                if rank == session.rank:
                    runs.append(_Run(name, at, begin - start, numel, begin))
        return runs
