"""How the ranks come to raise one error."""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist


def raise_together(error: Exception | None) -> None:
    """Raise on every rank what the first failing rank brings, if any does. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else (_pickled(error), f"{type(error).__name__}: {error}"))
    failed = [(rank, packed) for rank, packed in enumerate(told) if packed is not None]
    if not failed:
        return
    rank, (packed, text) = failed[0]
    if rank == dist.get_rank() and error is not None:
        raise error
    try:
        other = pickle.loads(packed)
    except Exception:
        other = None
    if not isinstance(other, Exception):
        other = RuntimeError(text)
    other.add_note(f"raised on rank {rank}")
    raise other


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return b""
