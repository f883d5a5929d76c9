"""The library's arguments with the three flags, and the strategy that they mean."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import shardkit
from shardkit.errors import StrategyError
from shardkit.transformers import _sharded_ddp
from shardkit.transformers._deepspeed import DeepSpeedFile


@dataclass
class _Flags:
    """What is added to the library's arguments, and ``deepspeed`` with another meaning."""

    sharded_ddp: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "simple",
            "help": "Train with FairScale: alone or as 'simple' optimizer state and gradients are split over the "
            "processes, with 'zero_dp_2' or 'zero_dp_3' the parameters, too (on CUDA), to which 'offload' and "
            "'auto_wrap' can be added.",
        },
    )
    strategy: str | None = field(
        default=None,
        metadata={
            "help": "Train under a strategy of shardkit, such as 'fsdp:offload=cpu' or that of a strategy's file."
        },
    )

    def __post_init__(self) -> None:
        own: Any = self
        own.sharded_ddp = _sharded_ddp.parse(self.sharded_ddp)
        if (own.sharded_ddp or own.deepspeed or self.strategy) and not torch.accelerator.is_available():
            # Without it the library takes each process that was launched for one alone.
            own.use_cpu = True
        # The library's own integration would take it.
        asked, own.deepspeed = own.deepspeed, None
        try:
            super().__post_init__()  # type: ignore[misc]
        finally:
            own.deepspeed = asked
        self.to_strategy()

    @property
    def deepspeed_file(self) -> DeepSpeedFile | None:
        """What ``deepspeed`` says, the path of a file, its text, or a mapping: read once, when it is first given."""
        asked: Any = getattr(self, "deepspeed", None)
        if not asked:
            return None
        held: tuple[Any, DeepSpeedFile] | None = getattr(self, "_deepspeed_read", None)
        if held is None or held[0] != asked:
            held = self._deepspeed_read = asked, DeepSpeedFile.read(asked)
        return held[1]

    def to_strategy(self, *, handed: Collection[str] = ()) -> shardkit.Strategy | None:
        """Return the strategy that the flags and the other arguments mean together; None without a flag.

        ``handed`` names what the Trainer is handed, of ``"optimizer"`` and ``"schedule"``.

        Raises:
            StrategyError: a flag's value is wrong, flags or arguments contradict each other.
            UnsupportedError: FairScale can't do on this device what ``sharded_ddp`` says.
        """
        args: Any = self
        flags = {"--sharded_ddp": self.sharded_ddp, "--deepspeed": args.deepspeed, "--strategy": self.strategy}
        given = [name for name, value in flags.items() if value]
        if not given:
            return None
        if len(given) > 1:
            raise StrategyError(
                f"{' and '.join(given)} can't be used together, since each says which library trains: leave one of them"
            )
        _check_others(args, given[0])
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if launched > 1 and args.world_size == 1:
            raise StrategyError(
                f"{launched} processes were launched, and the library takes this one for one alone, on {args.device}: "
                "give --use_cpu to train on CPU, or a device for each process"
            )
        common: dict[str, Any] = {
            "accumulate": args.gradient_accumulation_steps,
            "max_grad_norm": args.max_grad_norm or None,
            "precision": "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
        }
        if args.deepspeed:
            file = self.deepspeed_file
            assert file is not None
            return file.strategy(args, common, handed=handed)
        if self.sharded_ddp:
            strategy = shardkit.Strategy.parse(_sharded_ddp.strategy_of(args.sharded_ddp, args.device))
        else:
            strategy = _read(str(self.strategy))
        _check_agreement(strategy, common, given[0])
        return replace(strategy, track_grad_norm=True, **common)


def _read(text: str) -> shardkit.Strategy:
    if Path(text).suffix in (".json", ".toml") and ":" not in text:
        return shardkit.Strategy.load(text)
    return shardkit.Strategy.parse(text)


_ARGUMENTS = {
    "accumulate": "--gradient_accumulation_steps",
    "max_grad_norm": "--max_grad_norm",
    "precision": "--fp16 and --bf16",
}


def _check_agreement(strategy: shardkit.Strategy, common: dict[str, Any], flag: str) -> None:
    """Raise if a strategy says otherwise than the arguments which say the same for every Trainer."""
    plain = shardkit.Strategy(strategy.backend)
    lines = [
        f"\n  {name}: {getattr(strategy, name)!r}, but {_ARGUMENTS[name]} mean {value!r}"
        for name, value in common.items()
        if getattr(strategy, name) not in (value, getattr(plain, name))
    ]
    if lines:
        raise StrategyError(
            f"{flag} {str(strategy)!r} contradicts other arguments:{''.join(lines)}\n  take it out of the strategy"
        )


def _check_others(args: Any, flag: str) -> None:
    """Raise if an argument asks for what the library does by itself and a session doesn't.

    Raises:
        StrategyError: lists all of them.
    """
    asked = {
        "fsdp": (args.fsdp, "it is another flag that says which library trains: leave one of them"),
        "parallelism_config": (args.parallelism_config is not None, "a session is data-parallel on every rank"),
        "fp16_full_eval": (args.fp16_full_eval, "it casts the weights that are trained: evaluate in --fp16"),
        "bf16_full_eval": (args.bf16_full_eval, "it casts the weights that are trained: evaluate in --bf16"),
        "ddp_bucket_cap_mb": (
            args.ddp_bucket_cap_mb is not None,
            "sizes of buckets are options of a strategy (shardkit backends lists them)",
        ),
        "ddp_static_graph": (args.ddp_static_graph, "graphs may change from step to step"),
        "auto_find_batch_size": (
            args.auto_find_batch_size and args.world_size > 1,
            "one process that runs out of memory alone would leave the others waiting: shardkit max-batch finds it",
        ),
    }
    lines = [f"\n  --{name}: {why}" for name, (wrong, why) in asked.items() if wrong]
    if args.deepspeed_plugin is not None:
        lines.append("\n  accelerate's launcher asks for its own DeepSpeed: launch with torchrun")
    if lines:
        raise StrategyError(f"{flag} can't be used with:{''.join(lines)}")


@dataclass
class TrainingArguments(_Flags, transformers.TrainingArguments):  # type: ignore[misc]
    """The library's ``TrainingArguments`` with ``sharded_ddp``, ``strategy``, and a ``deepspeed`` that is shardkit's.

    At most one of the three says what trains; all other arguments mean what they meant. ``deepspeed`` takes the path of
    a JSON file, its text or a mapping.

    Raises:
        StrategyError: a flag's value is wrong, or contradicts other arguments, listed one by one.
        UnsupportedError: what ``sharded_ddp`` says can't be done on this device.
    """


@dataclass
class Seq2SeqTrainingArguments(_Flags, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """The library's ``Seq2SeqTrainingArguments`` with the same three flags as :class:`TrainingArguments`."""
