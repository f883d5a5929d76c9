"""Parameter groups: their settings follow the parameters, whatever groups these are in now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit.checkpoints._values import decode
from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def settings_of(
    number: int, group: list[str], place: Mapping[str, int], saved: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the settings that the checkpoint has for the parameters of a group here."""
    if not group:
        # Nothing trains under its settings.
        empty = number < len(saved) and not saved[number]["parameters"]
        return dict(saved[number]["settings"]) if empty else {}
    found = {place[name]: name for name in group}
    first, *others = found
    for other in others:
        one, two = saved[first]["settings"], saved[other]["settings"]
        for key in {**one, **two}:
            if one.get(key) != two.get(key):
                raise CheckpointError(
                    f"group {number} of the optimizer holds {found[first]!r} and {found[other]!r}, which were in "
                    f"groups of their own when the checkpoint was written, with {key} {one.get(key)} and "
                    f"{two.get(key)}: group them as then"
                )
    return dict(saved[first]["settings"])


def sources_of(
    number: int, group: list[str], place: Mapping[str, int], saved: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return which of the checkpoint's groups the parameters of a group here were in."""
    if group:
        return sorted({place[name] for name in group})
    return [number] if number < len(saved) and not saved[number]["parameters"] else []


def apply_settings(
    optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], held: Any, tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer's groups their settings, and itself the attributes that it held."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in decode(saved, dict(tensors)).items():
            before = group.get(key)
            if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
                # A schedule writes into the tensor itself.
                before.copy_(value)
            elif isinstance(before, Tensor) and isinstance(value, float | int):
                before.fill_(value)
            else:
                group[key] = value.clone() if isinstance(value, Tensor) else value
    for name, value in decode(held, dict(tensors)).items():
        setattr(optimizer, name, value)
