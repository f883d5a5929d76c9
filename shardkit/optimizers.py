"""What engines share about optimizers: how much of a model one must see at once, and copies of one for its parts."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from shardkit.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an optimizer looks to update one element.

    ``unit`` is what it must hold whole: an ``"element"``, so that parameters may be cut anywhere; a ``"parameter"``, as
    for a layer-wise trust ratio; or the ``"model"``. ``cause`` says, as the end of a sentence that begins with the
    optimizer's name, what speaks against a smaller unit. ``random`` is whether its steps draw random numbers that
    torch's default generator decides, so that replicas of the weights part.
    """

    unit: Literal["element", "parameter", "model"]
    cause: str = ""
    random: bool = False


def reach(optimizer: Optimizer) -> Reach:
    """Return how far an optimizer looks, tried on a few numbers with each group's settings.

    The trial takes milliseconds and leaves no trace. An optimizer that can't be tried is taken to need the whole model.
    """
    found = Reach("element")
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        wanted = {**_settings(group), "": sorted({value.dim() for value in group["params"]})}
        if group["params"] and not any(_same(wanted, other) for other in tried):
            tried.append(wanted)
            other = _reach(optimizer, group)
            unit = max(found.unit, other.unit, key=_UNITS.index)
            found = Reach(unit, other.cause if unit != found.unit else found.cause, found.random or other.random)
    return found


def twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and settings over other groups, without state and hooks.

    It isn't constructed anew, since a constructor may want arguments that nobody kept, nor copied by ``copy.copy``,
    which forgets what a subclass keeps in attributes. What a schedule or a session put in the place of a method stays
    behind.
    """
    kind = type(optimizer)
    other: Optimizer = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if callable(value) and callable(getattr(kind, name, None)):
            continue
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            value = OrderedDict()
        elif isinstance(value, dict | list | set):
            value = value.copy()
        other.__dict__[name] = value
    other.param_groups = groups
    other.state = defaultdict(dict)
    return other


@final
class Attributes:
    """Carries over to a twin what the user sets on the optimizer itself, after the twin was made."""

    def __init__(self, optimizer: Optimizer, twin: Optimizer) -> None:
        self._optimizer = optimizer
        self._twin = twin
        self._seen = dict(self._held())

    def follow(self) -> None:
        """Give the twin those attributes that have changed since the last time."""
        for name, value in self._held():
            if self._seen.get(name, self) is not value:
                self._seen[name] = self._twin.__dict__[name] = value

    def give_back(self) -> None:
        """Give the optimizer those attributes that the twin's step has changed, such as a count of its own."""
        for name, value in self._held(self._twin):
            if self._seen.get(name, self) is not value:
                self._seen[name] = self._optimizer.__dict__[name] = value

    def _held(self, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Any]]:
        for name, value in vars(optimizer or self._optimizer).items():
            if name[0] != "_" and name not in _OWN and not callable(value):
                yield name, value


_OWN = frozenset({"defaults", "state", "param_groups"})
_UNITS = ("element", "parameter", "model")
_STEPS = 3
_SIZES = ((3, 4), (5, 3))
"""Sizes of the first two dimensions of what is tried: two tensors for each number of dimensions, of unequal shapes."""


def cut(
    state: dict[str, Any], shape: torch.Size, start: int, count: int, *, backend: str, name: str, instead: str
) -> dict[str, Any]:
    """Return what of the state that an optimizer holds of a whole parameter belongs to a run of its elements.

    ``shape`` is the parameter's, ``start`` and ``count`` are the run's, and the rest is for the error's words: the
    backend, the parameter's name, and which strategies take the state.

    Raises:
        UnsupportedError: an entry is neither one value nor one for each element.
    """
    part: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            part[key] = copy.deepcopy(value)
        elif value.shape == shape and key != "step":
            part[key] = value.detach().reshape(-1).narrow(0, start, count).clone()
        elif value.numel() == 1:
            part[key] = value.detach().clone()
        else:
            raise UnsupportedError(
                f"backend {backend!r} can't shard the optimizer's state {key!r} of parameter {name!r}: its shape is "
                f"{tuple(value.shape)}, the parameter's {tuple(shape)}; use {instead}"
            )
    return part


def _reach(optimizer: Optimizer, group: dict[str, Any]) -> Reach:
    shapes = [
        (*sizes[:dim], *[2] * (dim - 2))
        for dim in sorted({value.dim() for value in group["params"]})
        for sizes in _SIZES
    ]
    trial = _Trial(optimizer, group, shapes)
    wholes: list[list[int]] = [[math.prod(shape)] for shape in shapes]
    try:
        together, changed = trial.start(wholes)
        again, _ = trial.run(wholes, alone=False, seed=1)
    except Exception as error:
        return Reach("model", f"can't be tried on a few numbers ({type(error).__name__}: {error})")
    random = not torch.equal(together.nan_to_num(), again.nan_to_num())
    if changed:
        return Reach(
            "model", f"changes its own {changed[0]!r} at each step, as if what it holds were the model", random
        )
    try:
        apart, _ = trial.run(wholes, alone=True)
    except Exception as error:
        return Reach("model", f"can't step with one parameter alone ({type(error).__name__}: {error})", random)
    if not _close(together, apart):
        return Reach("model", "gives something else for a parameter alone than beside others", random)
    if trial.sparse:
        return Reach("parameter", "takes sparse gradients only, as whole tensors have them", random)
    # Uneven pieces, as shards cut them.
    pieces = [[1, 2, size - 3] if size > 3 else [size] for (size,) in wholes]
    try:
        cut, _ = trial.run(pieces, alone=True, flat=True)
    except Exception as error:
        return Reach("parameter", f"can't step with pieces of a tensor ({type(error).__name__}: {error})", random)
    if not _close(together, cut):
        return Reach("parameter", "gives something else on a piece than on the whole tensor", random)
    return Reach("element", random=random)


@final
class _Trial:
    """Steps twins of an optimizer over a few numbers, always the same."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._shapes = shapes
        self._example: Tensor = group["params"][0]
        numbers = torch.Generator().manual_seed(0)
        count = sum(math.prod(shape) for shape in shapes)
        self._values = self._like(torch.rand(count, generator=numbers) + 0.5)
        self._gradients = [self._like(torch.randn(count, generator=numbers)) for _ in range(_STEPS)]
        self._initial = self._initial_state()
        self.sparse = False

    def start(self, wholes: list[list[int]]) -> tuple[Tensor, list[str]]:
        """Run on whole tensors together, from then on with sparse gradients if dense ones are refused."""
        try:
            return self.run(wholes, alone=False)
        except Exception as error:
            self.sparse = True
            try:
                return self.run(wholes, alone=False)
            except Exception:
                raise error from None

    def run(
        self, pieces: list[list[int]], *, alone: bool, flat: bool = False, seed: int = 0
    ) -> tuple[Tensor, list[str]]:
        """Return all elements after a few steps, and what the optimizer changed of itself after the first.

        Each of ``pieces`` is of so many elements; ``alone``, each has an optimizer of its own.
        """
        sizes = [size for sizes in pieces for size in sizes]
        shapes = [(size,) for size in sizes] if flat else self._shapes
        params = [
            part.clone().view(shape).requires_grad_()
            for part, shape in zip(self._values.split(sizes), shapes, strict=True)
        ]
        steppers = [self._twin([value]) for value in params] if alone else [self._twin(params)]
        changed: list[str] = []
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            for index, gradient in enumerate(self._gradients):
                for value, part in zip(params, gradient.split(sizes), strict=True):
                    dense = part.clone().view(value.shape)
                    value.grad = dense.to_sparse(1) if self.sparse else dense
                before = _plain(steppers[0])
                for stepper in steppers:
                    stepper.step()
                if index:
                    # Not the first: an optimizer may look at itself once.
                    after = _plain(steppers[0])
                    changed += [key for key in after if key not in before or not _equal(before[key], after[key])]
        return torch.cat([value.detach().flatten() for value in params]), changed

    def _twin(self, params: list[Tensor]) -> Optimizer:
        stepper = twin(self._optimizer, [{**_apart(_settings(self._group)), "params": params}])
        for name, value in vars(stepper).items():
            if name not in ("state", "param_groups"):
                stepper.__dict__[name] = _apart(value)
        for value in params if self._initial else ():
            stepper.state[value] = {
                key: entry.flatten()[:1].expand(value.shape).clone() if per_element else _apart(entry)
                for key, (entry, per_element) in self._initial.items()
            }
        return stepper

    def _initial_state(self) -> dict[str, tuple[Any, bool]]:
        """Return an entry of the state that the optimizer already holds, and whether it is one per element."""
        held = {id(value) for value in self._group["params"]}
        for parameter, entry in self._optimizer.state.items():
            if id(parameter) in held and parameter.numel() > 1:
                return {
                    key: (value, isinstance(value, torch.Tensor) and value.shape == parameter.shape)
                    for key, value in entry.items()
                }
        return {}

    def _like(self, value: Tensor) -> Tensor:
        return value.to(self._example.device, self._example.dtype)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings and plain attributes of an optimizer, to tell whether it changes them."""
    held = {**vars(optimizer), **_settings(optimizer.param_groups[0])}
    return {
        key: _apart(value) for key, value in held.items() if isinstance(value, bool | int | float | str | torch.Tensor)
    }


def _apart(value: Any) -> Any:
    """Return a value that can be changed without a trace, as far as it holds numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _apart(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_apart, value))
    return value


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)
