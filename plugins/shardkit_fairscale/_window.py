"""What the ranks agree on about the gradients of a window, before any weight moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.errors import InputError, UnsupportedError
from shardkit.gradients import all_finite, total_norm
from shardkit.gradients import norms as norms_of
from shardkit.owners import raise_together

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardkit_fairscale._reduce import Reducer
    from shardkit_fairscale._shard import Shards

# What a rank tells of each window, as counts that add up. The norms of the gradients that it owns come behind.
_NONFINITE, _CHANGED, _UNEVEN, _WRONG = range(4)
_COUNTS = 4


@dataclass(frozen=True)
class Window:
    """What holds of a window's gradients on every rank.

    ``used`` are the parameters that have a gradient, in the model's order, and ``beyond`` those of them that
    FairScale's buffers don't hold. ``norm`` is before clipping, where it is asked for.
    """

    finite: bool
    norm: Tensor | None
    used: list[Tensor]
    beyond: list[Tensor] = field(default_factory=list)


class Agreement:
    """How ranks settle a window: one small all-reduce, and more only where they used different parameters."""

    def __init__(self, model: nn.Module, shard: Shards, reducer: Reducer, *, wants_norm: bool) -> None:
        self._homes = [(part._parameters, name) for part in model.modules() for name in part._parameters]
        self._tenants = [home[name] for home, name in self._homes]
        self._shard = shard
        self._reducer = reducer
        self._wants_norm = wants_norm
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._parameters: list[Tensor] = list(self._names)
        self._device = self._parameters[0].device
        self._world = dist.get_world_size()
        self._own = shard.owned
        self._place = {parameter: place for place, parameter in enumerate(shard.optimized)}
        self._places = torch.tensor([_COUNTS + self._place[parameter] for parameter in self._own], device=self._device)
        self._trainable: list[bool] = []
        self._follow()
        # What is used, and in which order, the first window shows.
        self._guessed = True

    def settle(self) -> Window:
        """Return what holds of the window's gradients. Collective.

        Raises:
            UnsupportedError: a gradient came in pieces, or is sparse.
            InputError: the ranks froze different parameters, or the module has other parameters than at prepare.
        """
        reducer = self._reducer
        changed = [p.requires_grad for p in self._parameters] != self._trainable or not self._intact()
        uneven = len(reducer.absent) + sum(parameter.grad is not None for parameter in self._outside)
        counts, norms = self._exchange(changed, uneven, len(reducer.repeated) + len(reducer.sparse))
        if counts[_WRONG]:
            raise_together(self._wrong())
        beyond: list[Tensor] = []
        if counts[_CHANGED] or counts[_UNEVEN]:
            used = self._regroup(changed=counts[_CHANGED] > 0)
            beyond = [parameter for parameter in used if not parameter.requires_grad]
            counts, norms = self._exchange()
        elif reducer.sharded:
            used = self._scheduled
        else:
            used = [parameter for parameter in self._scheduled if parameter.grad is not None]
        if self._guessed and reducer.sharded:
            self._reorder()
        norm = self._total(norms, used)
        finite = not counts[_NONFINITE] if norm is None else bool(norm.isfinite())
        return Window(finite, norm, used, beyond)

    def learned(self) -> list[int] | None:
        """Return what is reduced, in order, each by its place among all names; None before the first window."""
        if self._guessed and self._reducer.sharded:
            return None
        places = {parameter: place for place, parameter in enumerate(self._by_name())}
        return [places[parameter] for parameter in self._reducer.schedule]

    def _by_name(self) -> list[Tensor]:
        return sorted(self._parameters, key=lambda parameter: self._names[parameter])

    def learn(self, order: list[int] | None) -> None:
        """Take up what another agreement has learned, the same on every rank. Collective."""
        self._guessed = order is None or not self._reducer.sharded
        if order is None:
            self._reducer.recall([value for value in reversed(self._parameters) if value.requires_grad])
        else:
            named = self._by_name()
            # What isn't used isn't in it, and is averaged once it is.
            self._reducer.recall([named[place] for place in order if place < len(named)])
        # What was frozen or thawed since the last window is yet to be found.
        known = self._trainable
        self._follow()
        self._trainable = known

    def _exchange(self, changed: bool = False, uneven: int = 0, wrong: int = 0) -> tuple[list[float], Tensor]:
        """Add up the counts of all ranks, and put the norms of all gradients together."""
        gradients = [parameter.grad for parameter in self._own if parameter.grad is not None]
        size = _COUNTS + (len(self._place) if self._wants_norm else 0)
        # Norms of any dtype are exact in doubles, and one owner's norm plus zeros is that norm.
        told = torch.zeros(size, dtype=torch.float64, device=self._device)
        if changed or uneven or wrong:
            told[_CHANGED], told[_UNEVEN], told[_WRONG] = changed, uneven, wrong
        if not self._wants_norm:
            told[_NONFINITE] = not all_finite(gradients)
        elif gradients:
            own_norms = norms_of(gradients).to(told.dtype)
            places = self._places
            if len(gradients) < len(self._own):
                places = places[[parameter.grad is not None for parameter in self._own]]
            told[places] = own_norms
        dist.all_reduce(told)
        return told[:_COUNTS].tolist(), told[_COUNTS:]

    def _total(self, norms: Tensor, used: Sequence[Tensor]) -> Tensor | None:
        """Return the global norm from each parameter's, as ``torch.nn.utils.get_total_norm`` does in one process."""
        if not self._wants_norm:
            return None
        counted = sorted(self._place[parameter] for parameter in used if parameter in self._place)
        if not counted:
            return norms.new_zeros(())
        if len(counted) < len(norms):
            norms = norms[counted]
        total: Tensor = torch.linalg.vector_norm(norms.to(used[0].dtype))
        return total

    def _regroup(self, *, changed: bool) -> list[Tensor]:
        """Return the parameters that any rank used, each with its average at its owner. Collective.

        Parameters that no schedule had are averaged here, one by one. From the next window on, all are in the schedule.
        """
        reducer, scheduled = self._reducer, set(self._scheduled)
        used = [
            parameter not in reducer.absent and (reducer.sharded or parameter.grad is not None)
            if parameter in scheduled
            else parameter.grad is not None
            for parameter in self._parameters
        ]
        trainable = [parameter.requires_grad for parameter in self._parameters]
        told = torch.tensor(
            [[*used, not self._intact()], [*trainable, False]], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(told)
        use, train = told.tolist()
        if use[-1]:
            raise InputError(
                "backend 'fairscale': the module has other parameters than when it was prepared: write new values into "
                "them (load_state_dict without assign=True), or close the session and prepare again"
            )
        apart = [
            parameter for parameter, count in zip(self._parameters, train[:-1], strict=True) if 0 < count < self._world
        ]
        if apart:
            raise InputError(
                f"backend 'fairscale': parameter {self._names[apart[0]]!r} requires a gradient on some ranks only: "
                "freeze and thaw the same parameters on every rank"
            )
        found = [parameter for parameter, count in zip(self._parameters, use[:-1], strict=True) if count]
        late = [parameter for parameter in found if parameter not in scheduled]
        for parameter in late:
            self._shard.reduce(parameter)
        kept = set(found)
        for parameter in self._scheduled:
            if parameter not in kept:
                parameter.grad = None
        schedule = [p for p in reducer.schedule if p.requires_grad and (p in kept or not self._guessed)]
        schedule += [parameter for parameter in late if parameter.requires_grad]
        if changed:
            self._shard.refresh()
            reducer.refresh(schedule)
            self._guessed = True
        else:
            reducer.reorder(schedule)
        self._follow()
        return found

    def _reorder(self) -> None:
        """Schedule the reductions in the order in which rank 0's gradients came. Collective."""
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        order = torch.full((len(places),), -1, device=self._device)
        came = [places[parameter] for parameter in self._reducer.arrived]
        order[: len(came)] = torch.tensor(came, dtype=order.dtype, device=self._device)
        dist.broadcast(order, src=0)
        scheduled = dict.fromkeys(self._parameters[place] for place in order.tolist() if place >= 0)
        known = set(self._reducer.schedule)
        first = [parameter for parameter in scheduled if parameter in known]
        self._reducer.reorder(first + [parameter for parameter in self._reducer.schedule if parameter not in scheduled])
        self._guessed = False

    def _intact(self) -> bool:
        return all(home.get(name) is tenant for (home, name), tenant in zip(self._homes, self._tenants, strict=True))

    def _follow(self) -> None:
        """Remember what holds until a rank tells of a change."""
        scheduled = set(self._reducer.schedule)
        self._scheduled = [parameter for parameter in self._parameters if parameter in scheduled]
        self._outside = [parameter for parameter in self._parameters if parameter not in scheduled]
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _wrong(self) -> UnsupportedError | None:
        for parameter in self._reducer.repeated:
            return UnsupportedError(
                f"backend 'fairscale' can't average the gradient of {self._names[parameter]!r}, which came in several "
                "pieces within one backward: checkpoint with use_reentrant=False, or use 'ddp:overlap=false'"
            )
        for parameter in self._reducer.sparse:
            return UnsupportedError(
                f"backend 'fairscale' can't average the sparse gradient of {self._names[parameter]!r}: use "
                "sparse=False, or the strategy 'ddp'"
            )
        return None


def alone(parameters: Sequence[Tensor], optimized: Sequence[Tensor], *, wants_norm: bool) -> Window:
    """Return what holds of the gradients of a single process."""
    used = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in optimized if parameter.grad is not None]
    norm = total_norm(gradients) if wants_norm else None
    finite = all_finite(gradients) if norm is None else bool(norm.isfinite())
    return Window(finite, norm, used)
