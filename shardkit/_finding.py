"""What a check of the machine found, as ``shardkit doctor`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit.errors import PluginError

LEVELS = ("fine", "note", "problem")


@dataclass(frozen=True)
class Finding:
    """One thing that a check looked at.

    ``check`` names it in a few words. ``level`` is ``"fine"``, ``"note"`` for what harms only some uses, or
    ``"problem"`` for what leads to wrong numbers, a hang or a failure. ``message`` says what was found and ``advice``
    what to do about it.
    """

    check: str
    level: Literal["fine", "note", "problem"]
    message: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise PluginError(f"the level of finding {self.check!r} is one of {LEVELS}, not {self.level!r}")
