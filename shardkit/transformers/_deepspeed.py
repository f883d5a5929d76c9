"""The flag ``--deepspeed``: a DeepSpeed JSON file, filled from the arguments and held against them."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import shardkit
from shardkit import ModelSize, _registry
from shardkit._prepare import understood
from shardkit.errors import StrategyError
from shardkit.transformers import _deepspeed_schedule as schedules
from shardkit.transformers._deepspeed_keys import (
    Contradictions,
    fill_optimizer,
    fill_precision,
    fill_scheduler,
    take_sizes,
    translate_offload,
    translate_scale,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

_logger = logging.getLogger("shardkit")


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a DeepSpeed JSON file said when it was read.

    ``source`` is how errors name it.
    """

    source: str
    config: dict[str, Any]

    @classmethod
    def read(cls, asked: Any) -> Self:
        """Read the path of a file, JSON text (it begins with a brace) or a mapping.

        Raises:
            StrategyError: it is missing, isn't JSON, names a key twice, or holds something else than an object.
        """
        if isinstance(asked, Mapping):
            source = "(a mapping)"
            try:
                # A copy, of what JSON knows.
                return cls(source, json.loads(json.dumps(dict(asked))))
            except (TypeError, ValueError) as error:
                raise StrategyError(f"the DeepSpeed configuration {source} is not JSON: {error}") from None
        if not isinstance(asked, str | os.PathLike):
            raise StrategyError(f"--deepspeed takes a path, JSON text or a mapping, not {asked!r}")
        given = os.fspath(asked)
        is_text = given.startswith("{")
        source = "(a text)" if is_text else repr(given)
        try:
            text = given if is_text else Path(given).read_text(encoding="utf-8-sig")
            config = json.loads(text, object_pairs_hook=_without_doubles)
        except FileNotFoundError:
            raise StrategyError(f"there is no DeepSpeed configuration {source}, which --deepspeed names") from None
        except OSError as error:
            raise StrategyError(f"can't read the DeepSpeed configuration {source}: {error.strerror}") from None
        except ValueError as error:
            raise StrategyError(f"the DeepSpeed configuration {source} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise StrategyError(f"the DeepSpeed configuration {source} holds a {type(config).__name__}, not an object")
        return cls(source, config)

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer is that of the file."""
        return self.config.get("optimizer") is not None

    @property
    def scheduler(self) -> bool:
        """Whether the schedule is that of the file."""
        return self.config.get("scheduler") is not None

    def strategy(self, args: Any, common: dict[str, Any], *, handed: Collection[str] = ()) -> shardkit.Strategy:
        """Return the strategy that the file and the arguments mean together.

        ``common`` is what the arguments say for every flag. ``handed`` names what the Trainer is handed: an
        ``"optimizer"`` is held against the file's section only where that says something, and, where its schedule is
        handed over too, not in what that has set.

        Raises:
            StrategyError: lists, key by key, where they contradict each other, or what can't be followed.
        """
        config = copy.deepcopy(self.config)
        found = Contradictions()
        translate_offload(config, found)
        take_sizes(config, args, found)
        fill_precision(config, args, found)
        fields, warning = translate_scale(config, args, found)
        written = config.get("optimizer")
        fill_optimizer(config, args, found)
        if "optimizer" in handed and isinstance(written, dict):
            given = written.get("params")
            scheduled = ("lr", "betas") if self.scheduler and "schedule" in handed else ()
            params = given.items() if isinstance(given, dict) else ()
            config["optimizer"] = {**written, "params": {key: value for key, value in params if key not in scheduled}}
        fill_scheduler(config, args, _known_steps(args), found)
        config.pop("scheduler", None)
        found.refuse(self.source)
        if warning and args.process_index == 0:
            _warn(f"DeepSpeed configuration {self.source}: {warning}")
        strategy = shardkit.Strategy(
            "deepspeed",
            options={"config": json.dumps({key: value for key, value in config.items() if value is not None})},
            track_grad_norm=True,
            **common,
            **fields,
        )
        self._follow(strategy, args)
        return strategy

    def _follow(self, strategy: shardkit.Strategy, args: Any) -> None:
        """Have the plugin check the configuration as it would when the model is prepared, without a model."""
        backend, options = understood(strategy, args.device)
        try:
            _registry.footprint(backend.name, ModelSize((), args.world_size, args.device.type), strategy, options)
        except StrategyError as error:
            told = f"--deepspeed {self.source}, filled from the arguments,"
            raise StrategyError(str(error).replace("DeepSpeed configuration given as text", told)) from None

    def take(self, optimizer: Optimizer | None, schedule: Any) -> Any:
        """Return the schedule that the Trainer was handed, as it is to be stepped; None where it was handed none.

        Raises:
            StrategyError: it is another one, or doesn't step the file's optimizer.
        """
        if schedule is None:
            return None
        name = type(schedule).__name__
        if self.optimizer and optimizer is None:
            raise StrategyError(
                f"the {name} that was handed to the Trainer steps an optimizer of its own, and --deepspeed "
                f"{self.source} has another one built: take the section 'optimizer' out of the file and hand that one "
                "over too, or hand over neither"
            )
        if self.scheduler and name != self.config["scheduler"].get("type"):
            raise StrategyError(
                f"scheduler.type of --deepspeed {self.source} is {self.config['scheduler'].get('type')!r}, but a "
                f"{name} was handed to the Trainer: take the section out of the file, or hand over None"
            )
        return schedules.Schedule(schedule) if self.scheduler else schedule

    def check_steps(self, args: Any, steps: int, schedule: Any) -> None:
        """Raise if the file contradicts the arguments, or a schedule that was handed over, of a known number of steps.

        Raises:
            StrategyError: lists the contradictions.
        """
        if not self.scheduler:
            return
        found = Contradictions()
        params = fill_scheduler(copy.deepcopy(self.config), args, steps, found)
        found.refuse(self.source)
        if schedule is not None:
            kind = self.config["scheduler"]["type"]
            lines = schedules.differences(schedule.inner, kind, params)
            if lines:
                raise StrategyError(
                    f"the section 'scheduler' of --deepspeed {self.source} contradicts the {kind} that was handed to "
                    f"the Trainer:{''.join(lines)}\n  take the section out of the file, or hand over None"
                )

    def make_scheduler(self, optimizer: Any, args: Any, num_training_steps: int) -> Any:
        """Return the file's schedule on an optimizer.

        Raises:
            StrategyError: the file contradicts the arguments, or DeepSpeed refuses a setting.
        """
        found = Contradictions()
        params = fill_scheduler(copy.deepcopy(self.config), args, num_training_steps, found)
        found.refuse(self.source)
        kind = self.config["scheduler"]["type"]
        try:
            return schedules.make(kind, getattr(optimizer, "optimizer", optimizer), params)
        except (TypeError, ValueError, AssertionError) as error:
            raise StrategyError(f"scheduler.params of --deepspeed {self.source}: {error}") from None


def _known_steps(args: Any) -> int | None:
    return int(args.max_steps) if args.max_steps > 0 else None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names the key {double!r} twice")
    return table


@cache
def _warn(text: str) -> None:
    _logger.warning(text)
