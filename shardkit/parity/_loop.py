"""A user's own loop, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardkit._session import Session
from shardkit._strategy import Strategy
from shardkit.errors import InputError
from shardkit.parity._record import Recording, record
from shardkit.parity._work import required_of


def check_loop(loop: Any) -> None:
    """Raise unless a loop can be called with a strategy and ``record``.

    Raises:
        InputError: it is no function, or takes other arguments.
    """
    if not callable(loop):
        raise InputError(f"a loop is a function of a strategy and record, not {loop!r}")
    count = required_of(loop)
    if count != 2:
        raise InputError(f"loop {_name(loop)!r} takes {count} arguments: a loop takes two, a strategy and record")


def run_loop(
    loop: Callable[..., Any],
    strategy: Strategy,
    path: str,
    *,
    detail: str = "sketch",
    begun: Callable[[Recording, Session], None] | None = None,
    ended: Callable[[Recording], None] | None = None,
) -> Recording:
    """Call ``loop(strategy, record)``, where ``with record(session):`` records into the file, and return the recording.

    ``begun`` and ``ended`` are called within the recording, at its beginning and end.

    Raises:
        InputError: the loop doesn't record, does so twice, or prepared another backend than that of the strategy, or
            that with other options.
    """
    made: list[Recording] = []

    @contextmanager
    def recorded(session: Session) -> Iterator[Recording]:
        if made:
            raise InputError("a loop records once: record was called again")
        prepared = session.strategy
        if (prepared.backend, prepared.options) != (strategy.backend, strategy.options):
            raise InputError(
                f"the loop was given the strategy {str(strategy)!r} and prepared {str(prepared)!r}: what is recorded "
                "would be told of the wrong one; pass on the strategy that it is given"
            )
        with record(session, path, detail=detail) as recording:  # type: ignore[arg-type]
            made.append(recording)
            if begun is not None:
                begun(recording, session)
            yield recording
            if ended is not None:
                ended(recording)

    loop(strategy, recorded)
    if not made:
        raise InputError(f"loop {_name(loop)!r} didn't record: it trains within `with record(session):`")
    return made[0]


def _name(loop: Any) -> str:
    return getattr(loop, "__name__", None) or type(loop).__name__
