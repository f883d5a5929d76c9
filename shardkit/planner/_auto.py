"""``Strategy("auto")``: the fastest strategy whose memory fits, chosen where the model is prepared."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit import _registry
from shardkit._backend import Backend, option
from shardkit._checks import check_fit
from shardkit._footprint import ModelSize, ParameterSize
from shardkit._options import typed_options
from shardkit._random import get_random_state, set_random_state
from shardkit._sizes import format_bytes, parse_bytes
from shardkit._strategy import Strategy
from shardkit.errors import MissingLibraryError, PluginError, ShardkitError, StrategyError, UnsupportedError
from shardkit.planner._ledger import storages
from shardkit.planner._optimizer import Cost, Stepper
from shardkit.planner._plan import Task, planned, rows
from shardkit.planner._profile import Event, Profile, owners
from shardkit.planner._results import Plan, Row
from shardkit.planner.outputs import why

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_USABLE = 0.9
"""The share of a device's memory that training may have: the rest is its context, and what fragments leave unused."""

_logger = logging.getLogger("shardkit")


@dataclass(frozen=True)
class AutoOptions:
    """The options of the strategy ``auto``."""

    memory: str | None = option(
        None, "memory of a rank, such as '24GiB'; None: nine tenths of the GPU, or of its part of the machine's"
    )
    activations: str | None = option(
        None,
        "what a micro-batch of a rank takes beside the model, such as '3GiB'; None: a third of the memory",
    )
    workload: str | None = option(None, "NAME or FILE.py[:FUNCTION], to know the activations from")
    batch_size: int | None = option(None, "with workload, the micro-batch of a rank", unit="samples")

    def __post_init__(self) -> None:
        if (self.workload is None) != (self.batch_size is None):
            raise StrategyError("options 'workload' and 'batch_size' of strategy 'auto' go together")
        if self.workload is not None and self.activations is not None:
            raise StrategyError("strategy 'auto' knows the activations from 'activations' or from 'workload', not both")
        if self.batch_size is not None and self.batch_size < 1:
            raise StrategyError(f"option 'batch_size' of strategy 'auto' is at least 1, not {self.batch_size}")


_DECLARED = Backend(name="auto", summary="the fastest strategy that fits", variants=(), options=AutoOptions)


def choose(
    strategy: Strategy, module: nn.Module, optimizer: Optimizer | None, device: torch.device, world_size: int
) -> Strategy:
    """Return the fastest strategy that fits, with the numerics that were asked for, and log why.

    Raises:
        StrategyError: an option is wrong.
        UnsupportedError: nothing fits; says what is short.
    """
    options = typed_options(_DECLARED, strategy.options)
    memory = _memory(device) if options.memory is None else parse_bytes(options.memory, "option 'memory' of 'auto'")
    candidates = list(_candidates(strategy, device, world_size))
    task = Task(tuple(candidates), memory, world_size, options.batch_size, device.type)
    if options.workload is not None:
        before = get_random_state(device)
        try:
            outcome = rows(options.workload, task)
        finally:
            set_random_state(before, device)
        if isinstance(outcome, ShardkitError):
            raise outcome
        found = outcome.rows
        known = f"a micro-batch of {options.batch_size} of {options.workload}"
    else:
        size = memory // 3 if options.activations is None else parse_bytes(options.activations, "'activations'")
        found = _states(module, optimizer, task, size)
        known = f"{format_bytes(size)} left to activations"
        if options.activations is None:
            known += " (a third, since none were told)"
    settings = {"memory": memory, "batch_size": options.batch_size}
    plan = Plan(settings, {}, 0, found)
    best = plan.fastest
    if best is None:
        raise UnsupportedError(f"strategy 'auto', {format_bytes(memory)} per rank, {known}: {why(plan)}")
    _tell(f"strategy 'auto' takes {best.strategy}: {format_bytes(memory)} per rank, {known}; {why(plan)}")
    return next(other for other in candidates if str(other) == best.strategy)


def _candidates(strategy: Strategy, device: torch.device, world_size: int) -> Iterator[Strategy]:
    """Yield every variant of every backend that is installed and can train so here.

    One process has nobody to share with: what only shards is left out.
    """
    for backend in _registry.backends().values():
        for variant in backend.variants:
            if world_size == 1 and variant.shards and not variant.offloads:
                continue
            parsed = Strategy.parse(variant.strategy)
            asked = dataclasses.replace(strategy, backend=parsed.backend, options=parsed.options)
            try:
                _registry.require_library(backend)
                check_fit(backend, asked, device)
            except (MissingLibraryError, UnsupportedError, StrategyError):
                continue
            yield asked


def _states(module: nn.Module, optimizer: Optimizer | None, task: Task, activations: int) -> list[Row]:
    """Return the rows of a model whose passes aren't known: its activations are there throughout the backward."""
    names = dict(module.named_parameters())
    groups: list[Any] = [] if optimizer is None else optimizer.param_groups
    updated = {id(value) for group in groups for value in group["params"]}
    sizes = tuple(
        ParameterSize(name, tuple(value.shape), value.element_size(), value.requires_grad, id(value) in updated)
        for name, value in names.items()
    )
    owned = owners(module)
    events = [Event("forward", told, 0, 0, 0) for told in owned.values()]
    events.append(Event("backward", (), 0, activations, activations))
    events += [
        Event("ready", (value.name,), value.nbytes, activations, activations)
        for value in reversed(sizes)
        if value.trainable
    ]
    profile = Profile(1, tuple(events), 0)
    stepper = None if optimizer is None else Stepper(optimizer, names, device=task.device)
    model = ModelSize(sizes, task.processes, task.device)
    rows = []
    for strategy in task.strategies:
        try:
            row = planned(
                strategy,
                model,
                lambda stepped: Cost(0, 0) if stepper is None else stepper.cost(stepped),
                profile,
                {name: told for told in owned.values() for name in told},
                extra=storages(list(module.buffers())),
                memory=task.memory,
            )
        except PluginError as error:
            # Nobody asked for this one by its name.
            row = Row(str(strategy), strategy.precision, "refused", note=str(error))
        rows.append(row)
    return rows


def _memory(device: torch.device) -> int:
    if device.type != "cpu":
        return int(_USABLE * torch.get_device_module(device).get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_USABLE * whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _tell(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        _logger.warning(text)
