"""The user's optimizer over fragments of parameters, which is what a rank holds from stage 1 on.

DeepSpeed hands an optimizer one flat tensor for a whole parameter group. Arithmetic on a flat tensor can't leave a
parameter alone that got no gradient, nor keep a step count for each. So the tensor that DeepSpeed steps with is cut
into views, one for each parameter's part, and the user's own class steps with those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from shardkit.optimizers import Attributes, cut, twin

if TYPE_CHECKING:
    from torch import Tensor


class Fragment(NamedTuple):
    """A run of elements of parameter number ``at``: ``size`` from ``start``, at ``offset`` in a flat tensor."""

    at: int
    start: int
    offset: int
    size: int


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


@dataclass
class _Flat:
    """One of DeepSpeed's flat tensors, and the fragments that lie in it."""

    tensor: Tensor
    group: dict[str, Any]
    fragments: list[Fragment] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)


@final
class Fragments(Optimizer):
    """What DeepSpeed takes for the optimizer: it steps the user's class over fragments of DeepSpeed's flat tensors."""

    def __init__(self, optimizer: Optimizer, groups: list[tuple[int, list[Tensor]]]) -> None:
        # DeepSpeed rewrites these groups; the user's and the twin's are others.
        super().__init__([{"params": params, **settings(optimizer.param_groups[at])} for at, params in groups], {})
        self.defaults = dict(optimizer.defaults)
        self.twin = twin(optimizer, [{**settings(group), "params": []} for group in optimizer.param_groups])
        self._attributes = Attributes(optimizer, self.twin)
        self.homes = [at for at, _ in groups]
        """For each group that DeepSpeed sees, the number of the user's."""
        self.absent: frozenset[int] = frozenset()
        """Indices of the parameters that got no gradient on any rank: they are left alone."""
        self.before: Callable[[Tensor], None] = lambda flat: None
        """Called with each flat tensor before it is updated."""
        self._flats: dict[int, _Flat] = {}
        self._pieces: dict[int, list[tuple[Fragment, Tensor]]] = {}

    def attach(self, flat: Tensor, group: int, fragments: Sequence[Fragment]) -> None:
        """Say which fragments lie in one of DeepSpeed's flat tensors, and of which of the user's groups they are."""
        cut = _Flat(flat, self.twin.param_groups[group], list(fragments))
        for fragment in fragments:
            # A leaf, as optimizers want it, that shares the flat tensor's memory.
            view = flat.detach().narrow(0, fragment.offset, fragment.size).requires_grad_()
            cut.views.append(view)
            cut.group["params"].append(view)
            self._pieces.setdefault(fragment.at, []).append((fragment, view))
        self._flats[id(flat)] = cut

    def within(self, flat: Tensor) -> list[Fragment]:
        """Return the fragments that lie in one of the flat tensors."""
        return self._flats[id(flat)].fragments

    def flats(self) -> list[Tensor]:
        """Return the flat tensors."""
        return [cut.tensor for cut in self._flats.values()]

    def fragments(self) -> list[tuple[Fragment, Tensor]]:
        """Return all fragments of this rank with their views."""
        return [pair for flat in self._flats.values() for pair in zip(flat.fragments, flat.views, strict=True)]

    def of(self, at: int) -> list[tuple[Fragment, Tensor]]:
        """Return this rank's fragments of parameter number ``at`` with their views."""
        return self._pieces.get(at, [])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the fragments in the flat tensors of ``param_groups``, from those tensors' gradients."""
        for held in self.param_groups:
            for flat in held["params"]:
                assert flat.grad is not None
                self.update(flat, [flat.grad.narrow(0, own.offset, own.size) for own in self.within(flat)])

    @torch.no_grad()
    def update(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Update the fragments in one of the flat tensors, each from its own gradient."""
        self._attributes.follow()
        cut = self._flats[id(flat)]
        self.before(flat)
        moved = []
        for fragment, view, gradient in zip(cut.fragments, cut.views, gradients, strict=True):
            if fragment.at not in self.absent:
                view.grad = gradient
                moved.append(view)
        if not moved:
            return
        everything, stepper = cut.group["params"], self.twin
        groups = stepper.param_groups
        cut.group["params"], stepper.param_groups = moved, [cut.group]
        try:
            stepper.step()
        finally:
            cut.group["params"], stepper.param_groups = everything, groups
            for view in moved:
                view.grad = None


def carried_state(state: dict[str, Any], shape: torch.Size, fragment: Fragment, name: str) -> dict[str, Any]:
    """Return a fragment's part of the state that an optimizer holds of the whole parameter.

    Raises:
        UnsupportedError: an entry is neither one value nor one for each element.
    """
    instead = "deepspeed:stage=0 or ddp"
    return cut(state, shape, fragment.start, fragment.size, backend="deepspeed", name=name, instead=instead)
