"""From a workload, a memory and a number of ranks to what each strategy would hold, and what batch fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardkit import _registry
from shardkit._backend import Backend
from shardkit._checks import check_fit, variant_of
from shardkit._footprint import Footprint, ModelSize, Stepped
from shardkit._options import typed_options
from shardkit._strategy import Strategy
from shardkit.errors import PluginError, ShardkitError
from shardkit.planner._curve import Curve
from shardkit.planner._declared import DeclaredFootprint
from shardkit.planner._optimizer import Cost, Stepper
from shardkit.planner._profile import Profile, Subject
from shardkit.planner._results import Row
from shardkit.planner._simulate import Peak, simulate
from shardkit.workloads import Workload, _find


@dataclass(frozen=True)
class Task:
    """What is asked of a plan. ``memory`` is in bytes, of one rank; None: no limit. ``batch`` is the one
    whose peak is told; None: the largest that fits, or 1."""

    strategies: tuple[Strategy, ...]
    memory: int | None
    processes: int
    batch: int | None
    device: str


@dataclass(frozen=True)
class Outcome:
    """A row for each strategy, the number of the model's elements, and what there is to say of how it was planned."""

    rows: list[Row]
    parameters: int
    notes: list[str]


def rows_alone(workload: str | Callable[[], Workload], task: Task) -> Outcome | ShardkitError:
    """Plan each strategy in a process that is there for nothing else."""
    # What a workload prints is none of the command's output.
    os.dup2(2, 1)
    return rows(workload, task)


def rows(workload: str | Callable[[], Workload], task: Task) -> Outcome | ShardkitError:
    """Plan each strategy. Building the workload seeds the generators of the process, and may print."""
    try:
        make = _find.function(workload) if isinstance(workload, str) else workload
        subject = Subject(make, device=task.device)
        planner = _Planner(subject, task)
        found = [planner.row(strategy) for strategy in task.strategies]
        return Outcome(found, sum(value.elements for value in subject.parameters), subject.notes)
    except ShardkitError as refusal:
        return refusal


class _Planner:
    def __init__(self, subject: Subject, task: Task) -> None:
        self._subject = subject
        self._task = task
        self._model = ModelSize(subject.parameters, task.processes, task.device)
        self._stepper = Stepper(subject.optimizer, subject.parameters_by_name, device=task.device)
        self._curves: dict[tuple[str, str | None], Curve] = {}
        self._owners = {name: names for names in subject.owners.values() for name in names}

    def row(self, strategy: Strategy) -> Row:
        try:
            return self._row(strategy)
        except PluginError as error:
            # Of a footprint, on its way through the window.
            return Row(str(strategy), strategy.precision, "refused", note=str(error))

    def _row(self, strategy: Strategy) -> Row:
        text = str(strategy)
        try:
            backend = _registry.describe(strategy.backend)
            options = typed_options(backend, strategy.options)
            check_fit(backend, strategy, torch.device(self._task.device))
            footprint = _footprint(self._model, backend, strategy, options)
        except ShardkitError as error:
            return Row(text, strategy.precision, "refused", note=str(error))
        curve = self._curve(strategy.precision, footprint.weights)
        cost = self._stepper.cost(_stepped(footprint, strategy))

        def peak(profile: Profile) -> Peak:
            fresh = _footprint(self._model, backend, strategy, options)
            return _peak(fresh, strategy, profile, cost, self._owners, self._subject.buffers)

        speed = variant_of(backend, strategy).speed
        memory, batch = self._task.memory, self._task.batch
        first = peak(curve.exactly(1))
        if memory is None:
            wanted = batch or 1
            found = peak(curve.exactly(wanted))
            around = _around(wanted)
            return _row(strategy, speed, "fits", found, wanted, [(at, peak(curve.near(at)).total) for at in around])
        if first.total > memory:
            return _row(strategy, speed, "short", first, 1, [(1, first.total)], largest=0, short=first.total - memory)
        largest = curve.largest(lambda profile: peak(profile).total, memory)
        around = _around(largest)
        points = [(at, peak(curve.near(at)).total) for at in around]
        wanted = batch or largest
        return _row(strategy, speed, "fits", peak(curve.near(wanted)), wanted, points, largest=largest)

    def _curve(self, precision: str, weights: str | None) -> Curve:
        key = precision, weights
        if key not in self._curves:
            self._curves[key] = Curve(lambda batch: self._subject.profile(batch, precision, weights))
        return self._curves[key]


def _around(batch: int) -> list[int]:
    """Return batches whose peaks tell of those up to twice this one: powers of two, and those near it."""
    near = {max(1, batch * tenths // 10) for tenths in (7, 8, 9, 10, 11, 12, 15, 20)}
    return sorted({2**power for power in range(batch.bit_length())} | near | {batch + 1})


def planned(
    strategy: Strategy,
    model: ModelSize,
    cost: Callable[[Sequence[Stepped]], Cost],
    profile: Profile,
    owners: Mapping[str, tuple[str, ...]],
    *,
    extra: int,
    memory: int | None,
) -> Row:
    """Return the row of a strategy for one profile, and nothing of other batches."""
    backend = _registry.describe(strategy.backend)
    options = typed_options(backend, strategy.options)
    footprint = _footprint(model, backend, strategy, options)
    peak = _peak(footprint, strategy, profile, cost(_stepped(footprint, strategy)), owners, extra)
    short = 0 if memory is None else max(0, peak.total - memory)
    points = [(profile.batch, peak.total)]
    speed = variant_of(backend, strategy).speed
    return _row(strategy, speed, "short" if short else "fits", peak, profile.batch, points, short=short)


def _peak(
    footprint: Footprint,
    strategy: Strategy,
    profile: Profile,
    cost: Cost,
    owners: Mapping[str, tuple[str, ...]],
    extra: int,
) -> Peak:
    # From the second micro-batch on all is as in the one before.
    micro_batches = min(strategy.accumulate, 2)
    with _registry.blaming(strategy.backend, "shardkit_footprint"):
        return simulate(footprint, profile, cost, owners, extra=extra, micro_batches=micro_batches)


def _stepped(footprint: Footprint, strategy: Strategy) -> list[Stepped]:
    with _registry.blaming(strategy.backend, "shardkit_footprint"):
        return [Stepped(*one) for one in footprint.stepped()]


def _footprint(model: ModelSize, backend: Backend, strategy: Strategy, options: Any) -> Footprint:
    told = _registry.footprint(backend.name, model, strategy, options)
    if told is not None:
        return told
    variant = variant_of(backend, strategy)
    return DeclaredFootprint(model, shards=variant.shards, offloads=variant.offloads)


def _row(
    strategy: Strategy,
    speed: float | None,
    status: Literal["fits", "short"],
    peak: Peak,
    batch: int,
    points: Sequence[tuple[int, int]],
    **more: Any,
) -> Row:
    return Row(
        str(strategy),
        strategy.precision,
        status,
        batch=batch,
        peak=peak.total,
        points=tuple(points),
        speed=speed,
        **dataclasses.asdict(peak),
        **more,
    )
