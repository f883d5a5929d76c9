"""The flag ``--sharded_ddp``: the values that Transformers 4.2 to 4.34 took, and the strategies that they mean."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from shardkit.errors import StrategyError, UnsupportedError

if TYPE_CHECKING:
    import torch


class ShardedDDPOption(StrEnum):
    """What ``--sharded_ddp`` can be given, one or several."""

    SIMPLE = "simple"
    """Optimizer state and gradients are split over the ranks: FairScale's OSS and ShardedDDP. So the bare flag."""
    ZERO_DP_2 = "zero_dp_2"
    """The parameters, too, which stay whole from the forward to the backward: FairScale's FullyShardedDataParallel."""
    ZERO_DP_3 = "zero_dp_3"
    """The same, gathered again for the backward; over a model that isn't wrapped in parts, FairScale does as before."""
    OFFLOAD = "offload"
    """With one of the two before: what is split waits in host memory."""
    AUTO_WRAP = "auto_wrap"
    """With one of the two before: repeated blocks are gathered one by one."""


def parse(value: str | bool | Iterable[str] | None) -> list[ShardedDDPOption]:
    """Return what the flag was given; nothing where it is off.

    Raises:
        StrategyError: a value is unknown, or values exclude each other.
    """
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(value, bool) or value is None:
        return [ShardedDDPOption.SIMPLE] if value else []
    words = value.split() if isinstance(value, str) else list(value)
    known = ", ".join(ShardedDDPOption)
    for word in words:
        if word not in list(ShardedDDPOption):
            raise StrategyError(f"--sharded_ddp takes one or several of {known}, not {str(word)!r}")
    options = list(dict.fromkeys(ShardedDDPOption(word) for word in words))
    given = " ".join(options)
    zero = [option for option in options if option in _ZERO]
    if ShardedDDPOption.SIMPLE in options and len(options) > 1:
        raise StrategyError(f"--sharded_ddp simple goes with no other value, and {given!r} was given")
    if len(zero) > 1:
        raise StrategyError(f"--sharded_ddp takes zero_dp_2 or zero_dp_3, not both, and {given!r} was given")
    if options and not zero and ShardedDDPOption.SIMPLE not in options:
        raise StrategyError(
            f"--sharded_ddp {given!r} says nothing of what is split: add it to zero_dp_2 or zero_dp_3, for example "
            f'--sharded_ddp "zero_dp_3 {given}"'
        )
    return options


def strategy_of(options: list[ShardedDDPOption], device: torch.device) -> str:
    """Return the strategy that the values mean on a device.

    Raises:
        UnsupportedError: FairScale can't do it there, or at all; the error names the strategy that does the same.
    """
    if options == [ShardedDDPOption.SIMPLE]:
        return "fairscale"
    settings = ["reshard_after_forward=false"] if ShardedDDPOption.ZERO_DP_2 in options else []
    added = [_SETTINGS[option] for option in options if option in _SETTINGS]
    same = ":".join(["fsdp", *([",".join(settings + added)] if settings or added else [])])
    given = " ".join(options)
    advice = f'use --strategy "{same}" in its place, which does the same with torch\'s own fully_shard'
    if device.type != "cuda":
        raise UnsupportedError(
            f"--sharded_ddp {given!r} needs CUDA, since FairScale gathers parameters in CUDA streams, and this process "
            f"trains on {device.type}: {advice}"
        )
    if added:
        raise UnsupportedError(f"--sharded_ddp {given!r} isn't driven over FairScale: {advice}")
    return "fairscale:shard=parameters"


_ZERO = (ShardedDDPOption.ZERO_DP_2, ShardedDDPOption.ZERO_DP_3)
_SETTINGS = {ShardedDDPOption.OFFLOAD: "offload=cpu", ShardedDDPOption.AUTO_WRAP: "wrap=auto"}
