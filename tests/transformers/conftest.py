"""Ranks of these tests come from a server that has imported the Trainer; behaviours are looked at once a flag."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from shardkit import testing
from tests.transformers import behaviours

testing.preload("tests.transformers.behaviours")

FLAGS: dict[str, dict[str, Any] | None] = {
    "own": None,
    "--strategy ddp": {"strategy": "ddp"},
    "--sharded_ddp": {"sharded_ddp": "simple"},
    "--strategy deepspeed:stage=2": {"strategy": "deepspeed:stage=2"},
    "--strategy deepspeed:stage=3": {"strategy": "deepspeed:stage=3"},
    "--strategy fsdp": {"strategy": "fsdp"},
}
"""The library's own Trainer under plain DDP, and flags."""

TELLING = ("short_windows", "frozen_parameters", "how_it_evaluates", "generated", "events", "counts")
"""What is looked at by default under strategies that shard; the rest, under these, is among the slow tests."""

SHARDING = ("--sharded_ddp", "--strategy deepspeed:stage=3", "--strategy fsdp")
EVERY = ("--strategy ddp", *SHARDING, "--strategy deepspeed:stage=2")

Look = Callable[[str, str], list[behaviours.Seen]]


@pytest.fixture(scope="session")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """Return a function that gives what each of two ranks saw of a behaviour under a flag."""

    @cache
    def looked(flag: str, names: tuple[str, ...]) -> list[dict[str, behaviours.Seen]]:
        folder = tmp_path_factory.mktemp("trainer")
        return testing.run(behaviours.look, str(folder), FLAGS[flag], list(names), timeout=600)

    def look(flag: str, name: str) -> list[behaviours.Seen]:
        for names in (tuple(behaviours.WRONG), TELLING):
            if name in names:
                return [ranks[name] for ranks in looked(flag, names)]
        names = tuple(other for other in behaviours.ALL if other not in TELLING)
        return [ranks[name] for ranks in looked(flag, names)]

    return look


def pairs(names: Iterable[str], flags: Iterable[str] = EVERY) -> Any:
    """Return a mark that gives a test ``name`` and ``flag``; those that others show as well are slow."""
    return pytest.mark.parametrize(
        ("name", "flag"),
        [
            pytest.param(name, flag, marks=() if _by_default(name, flag) else pytest.mark.slow)
            for flag in flags
            for name in names
        ],
    )


def _by_default(name: str, flag: str) -> bool:
    return flag == "--strategy ddp" or (name in TELLING and flag in SHARDING)


def unlike(expected: Any, seen: Any, where: str = "") -> list[str]:
    """Return where two sides differ: numbers by more than 1e-6 of the largest beside them, anything else at all."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        names = dict.fromkeys([*expected, *seen])
        return [line for name in names for line in unlike(expected.get(name), seen.get(name), f"{where}[{name!r}]")]
    if isinstance(expected, list) and isinstance(seen, list) and len(expected) == len(seen):
        if not all(isinstance(value, float) for value in expected + seen):
            parts = zip(expected, seen, strict=True)
            return [line for at, (one, other) in enumerate(parts) for line in unlike(one, other, f"{where}[{at}]")]
        scale = max(map(abs, expected), default=0.0)
        near = all(abs(one - other) <= 1e-6 * scale for one, other in zip(expected, seen, strict=True))
        return [] if near else [f"{where}: {seen}, not {expected}"]
    if isinstance(expected, float) and isinstance(seen, float):
        return [] if abs(expected - seen) <= 1e-6 * abs(expected) else [f"{where}: {seen}, not {expected}"]
    return [] if expected == seen and type(expected) is type(seen) else [f"{where}: {seen!r}, not {expected!r}"]
