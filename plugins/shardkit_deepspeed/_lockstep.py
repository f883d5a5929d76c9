"""Stage 3: ranks gather the same module's parameters, or say so before they gather another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.distributed as dist

from shardkit_deepspeed import _watch

if TYPE_CHECKING:
    from torch import nn

_END = -1


@final
class Lockstep:
    """Compares the order in which ranks run modules, at almost no cost once it is known.

    To gather is a collective that takes what the other ranks bring: were they at another module, of the same size, the
    weights would be mixed up silently. So the first time that a module follows another, or that a backward ends after
    it, all ranks meet at a gate. Where only one has ever followed, that is expected and costs a look into a table;
    where several have, all ranks know that and meet again. A rank that leaves the expected path comes to a gate where
    the others don't: they wait for it in a collective, look whether it stands at a gate, and let it know.
    """

    def __init__(self, model: nn.Module) -> None:
        # Number 0 is for what was added to the module since.
        self._names = ["a new module", *(repr(name or type(model).__name__) for name, _ in model.named_modules())]
        self._numbers = {id(part): at + 1 for at, part in enumerate(model.modules())}
        self._holds = {id(part) for part in model.modules() if next(part.parameters(recurse=False), None) is not None}
        self._followers: dict[int, set[int]] = {}
        self._last = _END
        self._parted: list[int] | None = None
        # Of its own: where ranks part, what they say of it meets no other collective.
        self._group = dist.new_group(backend="gloo")
        if dist.get_backend() == "gloo":
            _watch.open_reductions()

    def enter(self, part: nn.Module, forward: bool) -> None:
        """Take note that this rank is about to gather the parameters of ``part``. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        if id(part) not in self._holds and not getattr(part, "_external_params", None):
            return
        self._go(self._numbers.get(id(part), 0) * 2 + forward)

    def end(self) -> None:
        """Take note that this rank's backward is about to end. Collective.

        Raises:
            UnsupportedError: other ranks are elsewhere.
        """
        self._go(_END)

    def restart(self) -> None:
        """Forget the passes in progress, on all ranks."""
        self._last, self._parted = _END, None

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def _go(self, place: int) -> None:
        _watch.now_at(self._name(place))
        followers = self._followers.get(self._last, ())
        if self._parted is None and (len(followers) != 1 or place not in followers):
            self._parted = _watch.gate(place, self._group)
            if self._parted is None:
                self._followers.setdefault(self._last, set()).add(place)
        if self._parted is not None:
            _watch.refuse([self._name(other) for other in self._parted])
        self._last = place

    def _name(self, place: int) -> str:
        if place == _END:
            return "the end of its backward"
        name = self._names[place // 2]
        return name if place % 2 else f"{name} in backward"
