"""A user's own loop, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardkit._session import Session
from shardkit.errors import InputError
from shardkit.parity._record import Recording, record


def run_loop(
    loop: Callable[..., Any],
    strategy: Any,
    path: str,
    *,
    detail: str = "sketch",
    begun: Callable[[Recording, Session], None] | None = None,
    ended: Callable[[Recording], None] | None = None,
) -> Recording:
    """Call ``loop(strategy, record)``, where ``with record(session):`` records into the file, and return the recording.

    ``begun`` and ``ended`` are called within the recording, at its beginning and end.

    Raises:
        InputError: the loop doesn't record, or does so twice.
    """
    made: list[Recording] = []

    @contextmanager
    def recorded(session: Session) -> Iterator[Recording]:
        if made:
            raise InputError("a loop records once: record was called again")
        with record(session, path, detail=detail) as recording:  # type: ignore[arg-type]
            made.append(recording)
            if begun is not None:
                begun(recording, session)
            yield recording
            if ended is not None:
                ended(recording)

    loop(strategy, recorded)
    if not made:
        raise InputError("the loop didn't record: it trains within `with record(session):`")
    return made[0]
