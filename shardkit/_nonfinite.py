"""What is said of a step that was left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkit._precision import LossScaler
    from shardkit._processes import Processes


def describe_nonfinite(
    step: int, losses: list[float], backend: str, scaler: LossScaler | None, processes: Processes, *, answered: bool
) -> str | None:
    """Return what to say of a step that was left out, the same on every rank. Collective.

    None where a lower loss scale answers it and all losses are finite: that is how the scale finds its height.
    """
    ranks = processes.agree(None if all(map(math.isfinite, losses)) else ", ".join(map(str, losses)))
    found = [f"rank {rank}: {text}" for rank, text in enumerate(ranks) if text is not None]
    if answered and not found:
        return None
    cause = "the losses are finite, but a gradient is not"
    if found:
        cause = f"a loss is not finite ({'; '.join(found)})"
    scale = "" if scaler is None else f", the loss scale is {scaler.scale:g}"
    kept = f"weights and optimizer are as before it{scale}"
    return f"step {step} under {backend!r} was left out on every rank: {cause}; {kept}"
