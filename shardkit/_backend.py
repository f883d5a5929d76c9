"""What a backend declares of itself, as data, before its library is imported."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NoOptions:
    """The options of a backend that has none."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to ask for a backend: a row of ``shardkit backends``, an arm of ``shardkit compare``.

    ``shards`` and ``offloads`` name what is split over the ranks and what lives in host memory: of ``"parameters"``,
    ``"gradients"`` and ``"optimizer"``. ``speed`` is how many samples per second it trained, when its author measured
    it, over those of DistributedDataParallel in the same run; the planner goes by it to take the fastest that fits.
    """

    strategy: str
    summary: str
    shards: frozenset[str] = frozenset()
    offloads: frozenset[str] = frozenset()
    speed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend's declaration. What isn't declared is refused before the library is imported.

    ``library`` is the import name of the library behind the backend and ``requires`` the pip requirement that brings
    it, both None for a backend on torch alone. ``install`` is the command that installs it. ``options`` is a frozen
    dataclass whose fields come from :func:`option`. ``config_keys`` are the top-level keys of the library's own JSON
    configuration: a strategy given as a path to such a file goes to this backend, as its option ``config``.
    ``environment`` names the environment variables by which the library changes what it does, or what their names begin
    with, to be noted in traces.
    """

    name: str
    summary: str
    variants: tuple[Variant, ...]
    library: str | None = None
    requires: str | None = None
    install: str = ""
    devices: frozenset[str] = frozenset({"cpu"})
    precisions: frozenset[str] = frozenset({"fp32"})
    options: type[Any] = NoOptions
    config_keys: frozenset[str] = frozenset()
    environment: tuple[str, ...] = ()


def option(default: Any, doc: str, *, unit: str | None = None) -> Any:
    """Declare a field of an options dataclass: its default, what it does, and its unit.

    The field's annotation is its type: ``bool``, ``int``, ``float``, ``str``, a ``Literal`` of strings or numbers, a
    mapping, or one of them ``| None``.
    """
    return field(default=default, metadata={"doc": doc, "unit": unit})


def option_fields(options: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of an options dataclass by name."""
    return {item.name: item for item in dataclasses.fields(options)}
