"""What of a checkpoint fits what of a session: names with shapes, settings, and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What schedules of torch's write into an optimizer's groups."""


def check_settings(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise unless an optimizer knows the settings of one whose class isn't known.

    Raises:
        CheckpointError: names those that it doesn't.
    """
    known = {*optimizer.defaults, *(key for group in optimizer.param_groups for key in group)}
    found = {key for group in saved["groups"] for key in group["settings"]}
    unknown = sorted(found - known - _OF_SCHEDULES)
    if unknown:
        raise CheckpointError(
            f"the checkpoint is of an optimizer with {', '.join(map(repr, unknown))}, which this session's "
            f"{type(optimizer).__qualname__} doesn't have: prepare the session with the optimizer that wrote it"
        )


def raise_unless_equal(
    what: str,
    saved: Mapping[str, tuple[int, ...]],
    own: Mapping[str, tuple[int, ...]],
    saved_words: str = "the checkpoint",
    own_words: str = "this session",
    hint: str = "",
) -> None:
    """Raise unless both have the same names with the same shapes.

    Raises:
        CheckpointError: with up to three names of each kind, and how many there are.
    """
    told = []
    for names, words in (
        (sorted(saved.keys() - own.keys()), f"{saved_words} has {{}} that {own_words} lacks"),
        (sorted(own.keys() - saved.keys()), f"{own_words} has {{}} that {saved_words} lacks"),
    ):
        if names:
            shapes = {**saved, **own}
            listed = ", ".join(f"{name!r} {shapes[name]}" for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(words.format(f"{listed}{more}"))
    differing = [name for name in saved if name in own and saved[name] != own[name]]
    if differing:
        listed = ", ".join(f"{name!r} {saved[name]} in {saved_words} and {own[name]} here" for name in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        told.append(f"other shapes: {listed}{more}")
    if told:
        raise CheckpointError(f"{saved_words} doesn't fit {what}: {'; '.join(told)}{hint}")


def keeps(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return whether every number of one dtype is one of the other, too."""
    if saved == own:
        return True
    try:
        wider = torch.promote_types(saved, own) is own
    except RuntimeError:
        # Torch promotes no floats of 8 bits and no unsigned integers of more.
        return False
    # An integer has no more digits than another one that it is promoted to; a float may.
    return wider and (_has_fraction(saved) or not _has_fraction(own))


def _has_fraction(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex
