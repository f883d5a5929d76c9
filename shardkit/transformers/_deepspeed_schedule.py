"""DeepSpeed's own schedules, as the Trainer steps them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
        "last_batch_iteration",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    ),
}
"""The schedules of DeepSpeed 0.19.8, and what they take."""

REQUIRED = {"OneCycle": ("cycle_min_lr", "cycle_max_lr")}
"""What has no default, and no argument either."""


_STATE = ("optimizer", "org_lrs", "_last_lr", "last_batch_iteration")
"""Attributes of DeepSpeed's that aren't settings."""


class Schedule:
    """One of DeepSpeed's schedules. Its rates are those of the optimizer's groups, also before it is first stepped."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.optimizer: Optimizer = inner.optimizer

    def step(self) -> None:
        """Go on to the rates of the next step."""
        self.inner.step()

    def get_last_lr(self) -> list[Any]:
        """Return the rates of the step that comes."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps it has made."""
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a number of steps; the optimizer's own state holds the rates.

        Raises:
            ValueError: it is the state of a schedule of another kind.
        """
        if "last_batch_iteration" not in state:
            raise ValueError(
                f"it is the state of another kind of schedule, and the file's is {type(self.inner).__name__}: go on "
                "with the schedule that it was written with"
            )
        self.inner.load_state_dict(state)


def make(kind: str, optimizer: Optimizer, params: dict[str, Any]) -> Schedule:
    """Return one of DeepSpeed's schedules on an optimizer, whose groups have the first step's rates then.

    Raises:
        TypeError, ValueError: DeepSpeed refuses a setting.
    """
    for group in optimizer.param_groups:
        # As torch's own schedules: another one may have changed the rates that this one starts from.
        group["lr"] = group.setdefault("initial_lr", group["lr"])
    # JSON's 0 is a whole number, and would be the type of the groups' rate.
    params = {
        key: float(value) if type(value) is int and key.endswith("_lr") else value for key, value in params.items()
    }
    module = importlib.import_module("deepspeed.runtime.lr_schedules")
    with _quiet(module.logger):
        return Schedule(getattr(module, kind)(optimizer, **params))


def differences(handed: Any, kind: str, params: dict[str, Any]) -> list[str]:
    """Return lines that say where a schedule of the same class differs from that of the settings."""
    import torch

    groups = [
        {"params": [torch.zeros(1, requires_grad=True)], "lr": group.get("initial_lr", group["lr"])}
        for group in handed.optimizer.param_groups
    ]
    meant = vars(make(kind, torch.optim.Adam(groups), params).inner)
    held = vars(handed)
    return [
        f"\n  {name}: {value!r}, but it was made with {held.get(name)!r}"
        for name, value in meant.items()
        if name not in _STATE and not callable(value) and held.get(name) != value
    ]


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep DeepSpeed from warning that a new schedule hasn't been stepped."""

    def wanted(record: logging.LogRecord) -> bool:
        return "before it has started" not in record.getMessage()

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
