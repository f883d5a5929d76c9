"""A training in progress as a checkpoint sees it: its tensors by name, in the runs that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit.checkpoints._layout import Spec

if TYPE_CHECKING:
    from shardkit._engine import Engine
    from shardkit._processes import Processes
    from shardkit._strategy import Strategy


class Training(NamedTuple):
    """What a checkpoint needs of a session."""

    engine: Engine
    processes: Processes
    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]
    """The whole shape of each parameter."""
    device: torch.device
    library: str | None
    """The library under the backend."""

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def spec(self, name: str, values: Tensor) -> Spec:
        return Spec(values.dtype, self.shapes[name])


def aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters and buffers, each with the first."""
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first = {id(value): name for name, value in named()}
        for name, value in named(remove_duplicate=False):
            if first[id(value)] != name:
                found[name] = first[id(value)]
    return {name: first for name, first in found.items() if _is_saved(model, name)}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a module's ``state_dict`` has, each under its first name."""
    return {name: value for name, value in model.named_buffers() if _is_saved(model, name)}


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the parts of a module that keep a state of their own kind."""
    for name, part in model.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield name, part


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the plain values that an optimizer keeps in public attributes of its own."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name[0] != "_"
        and name not in ("defaults", "state", "param_groups")
        and isinstance(value, bool | int | float | str | Tensor)
    }


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id."""
    return {id(value): name for name, value in model.named_parameters()}


def _is_saved(model: nn.Module, name: str) -> bool:
    place, _, own = name.rpartition(".")
    return own not in model.get_submodule(place)._non_persistent_buffers_set
