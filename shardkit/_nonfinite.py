"""What is said of a step that was left out."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from shardkit.errors import NonFiniteError

if TYPE_CHECKING:
    from shardkit._precision import LossScaler
    from shardkit._processes import Processes
    from shardkit._strategy import Strategy


def report_nonfinite(
    step: int,
    losses: list[float],
    backend: str,
    strategy: Strategy,
    scaler: LossScaler | None,
    processes: Processes,
    answered: bool,
) -> None:
    """Raise or warn of a step that was left out, the same on every rank. Collective.

    ``answered`` says that a lower loss scale may be the cure: with finite losses that is how the scale finds its
    height, and nothing is said.

    Raises:
        NonFiniteError: the strategy asks for it, and no loss scale can answer.
    """
    ranks = processes.agree(None if all(map(math.isfinite, losses)) else ", ".join(map(str, losses)))
    found = [f"rank {rank}: {text}" for rank, text in enumerate(ranks) if text is not None]
    if answered and not found:
        return
    cause = f"a loss is not finite ({'; '.join(found)})" if found else "the losses are finite, but a gradient is not"
    scale = "" if scaler is None else f", the loss scale is {scaler.scale:g}"
    kept = f"parameters and optimizer are as before it{scale}"
    message = f"step {step} under {backend!r} was left out on every rank: {cause}; {kept}"
    if strategy.on_nonfinite == "raise" and not answered:
        raise NonFiniteError(message + '. Strategy(on_nonfinite="skip") goes on instead')
    warnings.warn(message, RuntimeWarning, stacklevel=3)
