"""Leads a footprint through a window of a workload's profile, and keeps the moment at which most is held."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._footprint import Footprint, Held

if TYPE_CHECKING:
    from shardkit.planner._optimizer import Cost
    from shardkit.planner._profile import Profile


@dataclass(frozen=True)
class Peak:
    """The bytes that a rank holds when it holds most, by kind, on the device that computes; ``moment`` says when.

    ``optimizer`` is the optimizer's state with master weights, ``buffers`` what backend and optimizer take in passing,
    ``activations`` what the passes through the model hold, with the batch. ``host`` is what is offloaded, at its most.
    """

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


def simulate(
    footprint: Footprint,
    profile: Profile,
    cost: Cost,
    owners: Mapping[str, tuple[str, ...]],
    *,
    extra: int,
    micro_batches: int,
) -> Peak:
    """Return the peak of a window of so many micro-batches, or of what comes before it.

    ``cost`` is that of the optimizer on what the footprint steps, ``owners`` the parameters that each one's module has,
    and ``extra`` what is held beside the parameters all the time, such as the model's buffers.
    """
    return _Simulation(footprint, profile, cost, owners, extra).run(micro_batches)


class _Simulation:
    def __init__(
        self, footprint: Footprint, profile: Profile, cost: Cost, owners: Mapping[str, tuple[str, ...]], extra: int
    ) -> None:
        self._footprint = footprint
        self._profile = profile
        self._owners = owners
        self._extra = extra
        self._cost = cost
        # Where the device is the CPU, what is offloaded lies in the same memory.
        self._one_memory = footprint.model.device == "cpu"
        self._away = footprint.offloaded_state and not self._one_memory
        self._state = 0
        self._peak = Peak("prepare", 0, 0, 0, 0, 0)
        self._host = 0

    def run(self, micro_batches: int) -> Peak:
        footprint, profile = self._footprint, self._profile
        self._look("prepare", 0, footprint.prepare())
        self._state = self._cost.state
        grown: set[str] = set()
        batch = profile.events[0].live
        for micro in range(micro_batches):
            self._look("batch", max(profile.data, batch) + profile.kept)
            self._pass(grown, last=micro == micro_batches - 1)
        before = Held(**vars(footprint.held))
        batch += profile.kept
        if not self._away:
            self._look("step", batch, self._cost.passing)
        passing = footprint.step()
        self._look("step", batch, passing, before)
        self._look("step", batch, passing)
        return dataclasses.replace(self._peak, host=0 if self._one_memory else self._host)

    def _pass(self, grown: set[str], *, last: bool) -> None:
        footprint = self._footprint
        backward = False
        module: tuple[str, ...] | None = None
        events = self._profile.events
        for place, event in enumerate(events):
            if event.kind == "forward":
                passing = footprint.forward(event.names)
                self._look("forward", event.live, passing)
            elif event.kind == "backward":
                backward = True
                self._look("backward", event.live, footprint.forward(()))
            else:
                name = event.names[0]
                passing = footprint.ready(name, 0 if name in grown else event.nbytes, last=last)
                grown.add(name)
                self._look("backward", event.live, passing)
            if backward:
                coming = next((other.names[0] for other in events[place + 1 :]), None)
                owner = self._owners[coming] if coming is not None else ()
                if owner != module:
                    self._look("backward", event.live, footprint.backward(owner))
                    module = owner
            self._look("backward" if backward else "forward", event.high)

    def _look(self, moment: str, activations: int, passing: int = 0, held: Held | None = None) -> None:
        held = held or self._footprint.held
        host = self._footprint.host
        optimizer = held.optimizer + (0 if self._away else self._state)
        away = host.total + (self._state if self._away else 0)
        self._host = max(self._host, away)
        parts = [held.parameters + self._extra, held.gradients, optimizer, held.buffers + passing]
        if self._one_memory:
            for place, size in enumerate((host.parameters, host.gradients, host.optimizer, host.buffers)):
                parts[place] += size
        parameters, gradients, optimizer, buffers = parts
        peak = Peak(moment, parameters, gradients, optimizer, buffers, activations)
        if peak.total > self._peak.total:
            self._peak = peak
