"""From a model, an optimizer and a strategy to a session."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit import _registry
from shardkit._buffers import Buffers, broadcast_module
from shardkit._checks import check_fit, check_model, check_optimizer, check_repeatable, fingerprint
from shardkit._evaluation import EvaluationEngine
from shardkit._options import typed_options
from shardkit._precision import check_precision, lower
from shardkit._processes import Processes, expected_world_size, same_everywhere
from shardkit._random import seed_everything
from shardkit._session import Session
from shardkit._strategy import Strategy, is_path, read_file
from shardkit.checkpoints._keeper import Keeper
from shardkit.checkpoints._training import Training
from shardkit.errors import InputError, ShardkitError, StateError, StrategyError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from shardkit._backend import Backend

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def prepare(model: nn.Module, optimizer: Optimizer | None, strategy: Strategy | str | Path) -> Session:
    """Return a session that trains the model under the strategy. Collective.

    ``strategy`` is a :class:`Strategy`, a string such as ``"ddp"`` or ``"deepspeed:stage=3"``, or the path of a JSON
    or TOML file: of a strategy, or of the configuration of a backend's library. ``optimizer`` None makes a session for
    evaluation. All ranks start from the weights and buffers of rank 0. Processes come from ``torchrun`` or
    :func:`shardkit.launch`; without a launcher this process trains alone. A process group that exists is used.

    Raises:
        ShardkitError: something is wrong or can't be done right; the same error on every rank, and the model is as it
            was. The tree of errors is in :mod:`shardkit.errors`.
    """
    return open_session(model, optimizer, strategy, **_overrides)


@contextmanager
def overriding(*, control: bool, any_version: bool) -> Iterator[None]:
    """Return a context in which :func:`prepare` does as :func:`open_session` with these arguments.

    For tools that run a loop which calls ``prepare`` itself.
    """
    before = dict(_overrides)
    _overrides.update(control=control, any_version=any_version)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


_overrides: dict[str, bool] = {}


def open_session(
    model: nn.Module,
    optimizer: Optimizer | None,
    strategy: Strategy | str | Path,
    *,
    control: bool = False,
    any_version: bool = False,
) -> Session:
    """Do as :func:`prepare`; as a ``control`` over the backend's library by itself in the place of the plugin's engine.

    With ``any_version`` the library may be older than the plugin was written for.
    """
    plan, refusal = _plan(model, optimizer, strategy, control=control, any_version=any_version)
    if refusal is not None and expected_world_size() == 1:
        raise refusal
    processes = Processes(plan.device)
    try:
        facts = processes.agree({} if refusal else plan.facts(), refusal)
        same_everywhere(facts)
        return _open(plan, processes)
    except BaseException:
        processes.close()
        raise


@dataclasses.dataclass
class _Plan:
    """What was asked for, as far as it could be understood."""

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer | None
    device: torch.device | None = None
    strategy: Strategy | None = None
    backend: Backend | None = None
    options: Any = None
    control: bool = False

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on every rank."""
        assert self.strategy is not None
        options = {name: _content(value) for name, value in self.strategy.options.items()}
        strategy = str(dataclasses.replace(self.strategy, options=options))
        return {"strategy": strategy, **fingerprint(self.module, self.optimizer)}


def _plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    strategy: Strategy | str | Path,
    *,
    control: bool,
    any_version: bool,
) -> tuple[_Plan, ShardkitError | None]:
    """Check all that one rank can know by itself, before anything heavy is imported; return the first refusal."""
    # torch.compile hides the module behind another whose parameters bear other names.
    plan = _Plan(model, getattr(model, "_orig_mod", model), optimizer, control=control)
    try:
        plan.device = check_model(plan.module)
        _check_unprepared(plan.module)
        plan.strategy = resolve(strategy)
        if plan.strategy.backend == "auto":
            from shardkit.planner._auto import choose

            plan.strategy = choose(plan.strategy, plan.module, optimizer, plan.device, expected_world_size())
        plan.backend, plan.options = understood(plan.strategy, plan.device, any_version=any_version)
        check_precision(plan.module, plan.strategy.precision, plan.device)
        _registry.load_wrappers()
        if optimizer is None and control:
            raise InputError("a control trains: hand over an optimizer")
        if optimizer is not None:
            check_optimizer(plan.module, optimizer)
            if expected_world_size() > 1:
                check_repeatable(plan.backend, optimizer)
    except ShardkitError as refusal:
        return plan, refusal
    return plan, None


def understood(strategy: Strategy, device: torch.device, *, any_version: bool = False) -> tuple[Backend, Any]:
    """Return the backend and the options that a strategy means on a device; imports nothing heavy. Not collective.

    Raises:
        ShardkitError: there is no such backend or option, or the backend doesn't run there, or lacks its library.
    """
    backend = _registry.describe(strategy.backend)
    options = typed_options(backend, strategy.options)
    check_fit(backend, strategy, device)
    _registry.require_library(backend, any_version=any_version)
    return backend, options


def _content(value: Any) -> Any:
    """Return an option's value; of a file what is in it, since nodes may keep it in other places."""
    # Path.is_file() raises of a text that is longer than any path.
    if isinstance(value, str) and os.path.isfile(value):
        return f"a file with digest {hashlib.sha256(Path(value).read_bytes()).hexdigest()[:12]}"
    return value


def _open(plan: _Plan, processes: Processes) -> Session:
    module, optimizer, strategy, backend = plan.module, plan.optimizer, plan.strategy, plan.backend
    assert strategy is not None
    assert backend is not None
    assert plan.device is not None
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    for value in module.parameters():
        # A window starts from nothing: what an earlier backward left would count in the first step.
        value.grad = None
    if processes.world_size > 1:
        broadcast_module(module)
    engine, failure = None, None
    try:
        if plan.control:
            assert optimizer is not None
            engine = _registry.control(backend.name, module, optimizer, strategy, plan.options)
            if engine is None:
                raise UnsupportedError(
                    f"the plugin of backend {backend.name!r} has no control, a run of its library alone"
                )
        else:
            engine = _registry.build(backend.name, module, optimizer, strategy, plan.options)
    except Exception as error:
        failure = error
    processes.agree(None, failure)
    engine = engine or EvaluationEngine(module)
    if strategy.seed is not None:
        seed_everything(strategy.seed + processes.rank)
    # What a library does with buffers is its own, and ranks that wait for each other hide its races.
    buffers = Buffers(module) if processes.world_size > 1 and not plan.control else None
    called = plan.model if engine.model is module else engine.model
    raise_again = lower(called, strategy.precision, plan.device)
    _prepared.add(module)

    def forget() -> None:
        raise_again()
        _prepared.discard(module)

    return Session(
        called,
        engine,
        strategy,
        backend,
        processes,
        buffers,
        Keeper(Training(engine, processes, strategy, shapes, plan.device, backend.library)),
        plan.device,
        forget,
    )


def resolve(strategy: Strategy | str | Path) -> Strategy:
    """Return the strategy that an object, a string or a file stands for.

    Raises:
        StrategyError: it is none of them, or the file is not one that shardkit or a backend can read.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str) and not is_path(strategy):
        return Strategy.parse(strategy)
    if not isinstance(strategy, str | Path):
        raise StrategyError(f"a strategy is a Strategy, a string or a path, not a {type(strategy).__name__}")
    path = str(strategy)
    values = read_file(path)
    if "backend" in values:
        return Strategy.from_mapping(values, path)
    # The configuration file of a backend's library: it belongs to the backend that knows most of its keys.
    known = {name: len(backend.config_keys & values.keys()) for name, backend in _registry.backends().items()}
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or not known[best]:
        raise StrategyError(
            f"{path}: neither a strategy (it has no 'backend') nor the configuration of an installed backend; "
            f"its keys are {', '.join(sorted(values)) or 'none'}"
        )
    return Strategy(best, options={"config": path})


def _check_unprepared(module: nn.Module) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    for other in _prepared:
        if other is module or any(id(parameter) in own for parameter in other.parameters()):
            raise StateError(
                f"this {type(module).__name__} is prepared already, or shares parameters with a "
                f"{type(other).__name__} that is: close its session first. A model has one session; for other settings "
                "on other parameters give it one optimizer with a group for each"
            )
