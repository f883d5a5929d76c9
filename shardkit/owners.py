"""What engines share in which each parameter has one owner: the rank that holds its optimizer state and updates it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from shardkit.errors import InputError
from shardkit.optimizers import Attributes, twin

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# What belongs to the tensors of a group, and not to its settings.
_OF_THE_TENSORS = ("params", "param_names")


@final
class Part:
    """What one rank steps: a copy of the user's optimizer over the parameters that it owns.

    The user keeps the optimizer that was handed over: the copy takes settings and attributes from it at each step, and
    its step hooks are called. ``backend`` is the name that errors bear, and ``names`` the parameters of the model.
    """

    stepper: Optimizer

    def __init__(self, backend: str, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        self._backend = backend
        self._user = optimizer
        self._names = names

    def over(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the copy, as ``stepper``: over the ``params`` of these groups, which are those of the user's in
        their order, and no others. A library that makes its optimizer from a class is given this in its place."""
        self.stepper = twin(
            self._user,
            [_narrowed(group, own["params"]) for group, own in zip(self._user.param_groups, groups, strict=False)],
        )
        self._attributes = Attributes(self._user, self.stepper)
        return self.stepper

    def carry_over(self, owner: Callable[[Tensor], int]) -> None:
        """Move the state that the user's optimizer has already, as rank 0 has it, to the owners. Collective.

        Raises:
            InputError: the ranks' isn't of one kind.
        """
        user = self._user
        state = {parameter: user.state[parameter] for parameter in self._names if user.state.get(parameter)}
        alone = dist.get_world_size() == 1
        if not alone:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, [(self._names[key], _described(entries)) for key, entries in state.items()])
            if any(other != told[0] for other in told):
                raise InputError(
                    f"backend {self._backend!r}: the optimizer brings state of earlier steps that isn't the same on "
                    "every rank: load the same state on all, or hand over a fresh optimizer"
                )
        for parameter, entries in state.items():
            for value in entries.values():
                if not alone and isinstance(value, torch.Tensor):
                    sent = value.to(parameter.device)
                    dist.broadcast(sent, src=0)
                    value.copy_(sent)
            if owner(parameter) == dist.get_rank():
                self.stepper.state[parameter] = entries
        # One copy of the state is enough, and it is the session's now.
        user.state.clear()

    def begin(self, groups: list[dict[str, Any]] | None = None) -> None:
        """Call the hooks that the user has put before a step, and follow the settings.

        ``groups`` are those of the library that take them where it gives them to the copy itself.
        """
        for before in self._user._optimizer_step_pre_hooks.values():
            before(self._user, (), {})
        self._attributes.follow()
        for user, own in zip(self._user.param_groups, groups or self.stepper.param_groups, strict=True):
            own.update((key, value) for key, value in user.items() if key not in _OF_THE_TENSORS)

    def end(self) -> None:
        """Call the hooks that the user has put after a step."""
        for after in self._user._optimizer_step_post_hooks.values():
            after(self._user, (), {})

    def give_back(self) -> None:
        """Give the user's optimizer what a step has changed of the copy's settings and attributes.

        For a single process, which trains with an optimizer that changes itself; those of several ranks would part.
        """
        self._attributes.give_back()
        for user, own in zip(self._user.param_groups, self.stepper.param_groups, strict=True):
            user.update((key, value) for key, value in own.items() if key not in _OF_THE_TENSORS)


def raise_together(error: Exception | None) -> None:
    """Raise on every rank what the first failing rank brings, if any does. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else (_pickled(error), f"{type(error).__name__}: {error}"))
    failed = [(rank, packed) for rank, packed in enumerate(told) if packed is not None]
    if not failed:
        return
    rank, (packed, text) = failed[0]
    if rank == dist.get_rank() and error is not None:
        raise error
    try:
        other = pickle.loads(packed)
    except Exception:
        other = None
    if not isinstance(other, Exception):
        other = RuntimeError(text)
    other.add_note(f"raised on rank {rank}")
    raise other


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return b""


def _narrowed(group: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    narrowed = {**group, "params": parameters}
    if "param_names" in group:
        names = {id(p): name for p, name in zip(group["params"], group["param_names"], strict=True)}
        narrowed["param_names"] = [names[id(p)] for p in parameters]
    return narrowed


def _described(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key, f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value))
        for key, value in entries.items()
    ]
