"""Launches of ranks that the tests of a session will ask for, a few at a time: ranks wait for each other a lot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

WORKERS = 3
"""How many launches run at a time: two ranks each leave more than half of two cores idle."""

_pool = ThreadPoolExecutor(WORKERS)
_started: dict[Hashable, Future[Any]] = {}


def result(key: tuple[Any, ...], wanted: Iterable[tuple[Any, ...]], launch: Callable[..., Any]) -> Any:
    """Return what ``launch(*key)`` gives, after starting it for all keys in ``wanted`` that weren't started yet."""
    for other in (key, *wanted):
        if (launch, other) not in _started:
            _started[launch, other] = _pool.submit(launch, *other)
    return _started[launch, key].result()


def selected(session: pytest.Session, function: Callable[..., object], *names: str) -> list[tuple[Any, ...]]:
    """Return the parameters of these names of all selected tests of a function, in order, each combination once."""
    found = [
        tuple(item.callspec.params[name] for name in names)
        for item in session.items
        if isinstance(item, pytest.Function) and item.function is function and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(found))


def stop() -> None:
    """Start no more."""
    _pool.shutdown(wait=False, cancel_futures=True)
