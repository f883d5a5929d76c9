"""Run strategies in one environment or in several, in turns, each several times in fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardkit import _registry
from shardkit._backend import Backend
from shardkit._options import typed_options
from shardkit._strategy import Strategy, is_path
from shardkit.errors import InputError, MissingLibraryError, PluginError, StrategyError
from shardkit.parity._judge import measured
from shardkit.parity._results import Distances, Failure, Measured
from shardkit.parity._runner import Ran, Runner
from shardkit.parity._trace import Trace
from shardkit.parity._work import Work

_PROBE = Work("mlp", steps=100, batch_size=4, accumulate=1)
_PROBES = 2


class Arm(NamedTuple):
    """A strategy; as a control, its library is driven by itself."""

    strategy: str
    control: bool = False

    def __str__(self) -> str:
        return f"{self.strategy} (library alone)" if self.control else self.strategy


class Listener:
    """What a caller hears while runs go on; this one ignores it."""

    def plan(self, runs: int) -> None:
        """So many runs are to come."""

    def note(self, text: str) -> None:
        """Something is worth a line."""

    def begin(self, name: str, steps: int | None) -> None:
        """A run starts; None where nobody knows how many steps it takes."""

    def progress(self, steps: int) -> None:
        """The run has taken so many steps."""

    def end(self, name: str, outcome: str) -> None:
        """The run is over."""


@dataclass
class Side:
    """An environment, by the process that runs tasks in it; without one nothing can run there, for a reason."""

    name: str
    runner: Runner | None
    failure: Failure | None = None
    any_version: bool = False
    reference: Trace | None = None
    baseline: Measured | None = None
    arms: dict[Arm, Measured] = field(default_factory=dict)


def measure(
    sides: Sequence[Side],
    work: Work,
    arms: Sequence[Arm],
    *,
    is_loop: bool,
    repeats: int,
    probe: bool,
    timeout: float,
    listener: Listener,
) -> None:
    """Run the reference, the baseline and each arm on each side, in turns, and fill in what the sides hold.

    A loop has neither reference nor baseline: nobody knows it but itself. A run that fails isn't repeated. With
    ``probe`` each arm also trains a small perceptron for many quick steps, twice, with nothing recorded but losses: a
    race that a slow model or a recording hides shows there.
    """
    able = [side for side in sides if side.runner is not None]
    if len(able) < len(sides):
        # There is nothing to compare: it is enough to see that the rest runs.
        repeats, probe = 1, False
    probed_runs = _PROBES * len(arms) if probe else 0
    listener.plan(len(able) * ((0 if is_loop else 1 + repeats) + repeats * len(arms) + probed_runs))
    outcomes: dict[tuple[str, Arm | None], list[Ran | Failure]] = {}

    def run(side: Side, kind: str, arm: Arm | None = None, work: Work = work, detail: str = "sketch") -> Ran | Failure:
        assert side.runner is not None
        name = f"{side.name}: {arm or kind}" if len(sides) > 1 else str(arm or kind)
        if detail == "losses":
            name += " (probe)"
        listener.begin(name, None if is_loop and detail == "sketch" else work.steps)
        found = side.runner.run(
            work,
            kind,
            timeout=timeout,
            strategy=arm.strategy if arm else "",
            control=bool(arm and arm.control),
            any_version=side.any_version,
            detail=detail,
            progress=listener.progress,
        )
        listener.end(name, found.headline if isinstance(found, Failure) else "")
        return found

    if not is_loop:
        for side in able:
            found = run(side, "reference")
            if isinstance(found, Failure):
                if found.stage == "refused":
                    raise InputError(found.headline.partition(": ")[2] or found.headline)
                listener.note(f"{side.name}: there is no reference: {found.headline}")
            else:
                side.reference = found.trace
    for _ in range(repeats):
        for arm in [*([] if is_loop else [None]), *arms]:
            for side in able:
                held = outcomes.setdefault((side.name, arm), [])
                if not any(isinstance(one, Failure) for one in held):
                    found = run(side, "arm" if arm else "baseline", arm)
                    if held and isinstance(found, Ran):
                        found = _slim(found, held[0])
                    held.append(found)
    probes: dict[tuple[str, Arm], list[Ran | Failure]] = {}
    for _ in range(_PROBES if probe else 0):
        for arm in arms:
            for side in able:
                held = probes.setdefault((side.name, arm), [])
                if not any(isinstance(one, Failure) for one in [*held, *outcomes[side.name, arm]]):
                    held.append(
                        run(side, "arm", arm, replace(_PROBE, processes=work.processes, device=work.device), "losses")
                    )
    for side in sides:
        plain: Distances | None = None
        if (side.name, None) in outcomes:
            side.baseline = measured(outcomes[side.name, None], side.reference, None)
            plain = side.baseline.distances
        for arm in arms:
            if side.failure is not None:
                side.arms[arm] = Measured(side.failure)
            else:
                probed = probes.get((side.name, arm), [])
                side.arms[arm] = measured(outcomes[side.name, arm], side.reference, plain, probed)


def _slim(ran: Ran, first: Ran | Failure) -> Ran:
    """Return a run whose final weights, if they are those of the first one, are kept once."""
    if isinstance(first, Ran):
        for name, value in ran.trace.final_weights.items():
            other = first.trace.final_weights.get(name)
            if other is not None and other.dtype == value.dtype and other.equal(value):
                ran.trace.final_weights[name] = other
    return ran


def check_repeats(repeats: int) -> None:
    """Raise unless each is to run at least once.

    Raises:
        InputError: it isn't.
    """
    if repeats < 1:
        raise InputError(f"repeats is at least 1, not {repeats}")


def arms_of(
    strategies: Sequence[str], backends: Sequence[str], device: str = "cpu", *, controls: bool, is_loop: bool
) -> tuple[list[Arm], list[str]]:
    """Return the arms of strategies that were asked for, or of all variants of some backends; and what was left out.

    A loop is driven as it is, not by a library alone, and its strategies are its own.

    Raises:
        StrategyError: the text of a strategy is wrong, or sets what holds for all.
        BackendNotFoundError: no installed backend has the name.
    """
    found: list[Arm] = []
    notes: list[str] = []
    controls = controls and not is_loop
    if strategies:
        for text in strategies:
            found += _with_control(text, _checked(text, is_loop), controls)
        return list(dict.fromkeys(found)), notes
    for name in backends:
        try:
            backend = _registry.describe(name)
        except PluginError as error:
            notes.append(f"{name}: {error}")
            continue
        for variant in backend.variants:
            if variant not in backend.variants_on(device):
                notes.append(f"{variant.strategy}: left out on {device}: {variant.elsewhere}")
                continue
            found += _with_control(variant.strategy, name, controls)
    return list(dict.fromkeys(found)), notes


def installed_backends() -> tuple[list[str], list[str]]:
    """Return the names of the backends whose library is installed, and why others are left out."""
    names, notes = [], []
    for name in _registry.claims():
        try:
            _registry.require_library(_registry.describe(name), any_version=True)
        except MissingLibraryError as error:
            notes.append(f"{name}: left out: {error}")
        except PluginError as error:
            notes.append(f"{name}: {error}")
        else:
            names.append(name)
    return names, notes


def backend_of(strategy: str) -> Backend:
    """Return the declaration of a strategy's backend."""
    return _registry.describe(_checked(strategy, is_loop=True))


def _with_control(strategy: str, backend: str, controls: bool) -> list[Arm]:
    both = controls and _registry.has_control(backend)
    return [Arm(strategy), Arm(strategy, control=True)] if both else [Arm(strategy)]


def _checked(text: str, is_loop: bool) -> str:
    """Return the name of the strategy's backend."""
    from shardkit._prepare import resolve

    strategy = resolve(text) if is_path(text) else Strategy.parse(text)
    for name in ("accumulate", "max_grad_norm", "seed"):
        if not is_loop and getattr(strategy, name) != getattr(Strategy("any"), name):
            raise StrategyError(
                f"strategy {text!r} sets {name!r}, which holds for all strategies of a comparison: use "
                f"--{name.replace('_', '-')}"
            )
    backend = _registry.describe(strategy.backend)
    typed_options(backend, strategy.options)
    return backend.name


def preload_of(arms: Sequence[Arm]) -> list[str]:
    """Return the libraries that the arms need, to be imported once in an environment."""
    libraries: Mapping[str, None] = {
        backend.library: None
        for backend in {arm.strategy: backend_of(arm.strategy) for arm in arms}.values()
        if backend.library is not None
    }
    return list(libraries)
