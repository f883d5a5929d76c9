"""What a backend declares of itself, as data, before its library is imported."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardkit.errors import PluginError

PARTS = ("parameters", "gradients", "optimizer")
"""What can be split over the ranks, or live in host memory."""

PRECISIONS = ("fp32", "bf16", "fp16")

DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu")
"""Kinds of torch's devices that a module can be trained on."""

NAMES = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

RESERVED = ("auto",)
"""Names of strategies that are no backend's."""


def check_name(name: Any) -> None:
    """Raise unless this can be the name of a backend.

    Raises:
        PluginError: it isn't lower-case letters, digits and dashes, or has a meaning of its own.
    """
    if not isinstance(name, str) or not NAMES.fullmatch(name):
        raise PluginError(
            "the name of a backend begins with a letter and is lower-case letters and digits, with single dashes or "
            f"underscores between them, such as 'my-backend', not {name!r}"
        )
    if name in RESERVED:
        raise PluginError(f"the name {name!r} has a meaning of its own as a strategy: give the backend another one")


@dataclass(frozen=True)
class NoOptions:
    """The options of a backend that has none."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to ask for a backend: a row of ``shardkit backends``, an arm of ``shardkit compare``.

    ``shards`` and ``offloads`` name what is split over the ranks and what lives in host memory: of ``"parameters"``,
    ``"gradients"`` and ``"optimizer"``. ``speed`` is how many samples per second it trained, when its author measured
    it, over those of DistributedDataParallel in the same run; the planner goes by it to take the fastest that fits.
    ``devices`` are those of the backend's on which it runs, all of them if None; ``elsewhere`` says why not on others,
    and what does the same there.
    """

    strategy: str
    summary: str
    shards: frozenset[str] = frozenset()
    offloads: frozenset[str] = frozenset()
    speed: float | None = None
    devices: frozenset[str] | None = None
    elsewhere: str = ""

    def __post_init__(self) -> None:
        _check_text(self.strategy, "field 'strategy' of a Variant")
        of = f"of variant {self.strategy!r}"
        _check_text(self.summary, f"field 'summary' {of}")
        _check_words(self.shards, PARTS, f"field 'shards' {of}")
        _check_words(self.offloads, PARTS, f"field 'offloads' {of}")
        speed = self.speed
        if speed is not None and not (_is_number(speed) and speed > 0 and math.isfinite(speed)):
            raise PluginError(f"field 'speed' {of} is above 0 and finite, or None, not {speed!r}")
        if self.devices is not None:
            _check_words(self.devices, DEVICES, f"field 'devices' {of}")
        _check_text(self.elsewhere, f"field 'elsewhere' {of}")


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

    def __post_init__(self) -> None:
        _check_text(self.name, "field 'name' of a Backend")
        of = f"of backend {self.name!r}"
        _check_text(self.summary, f"field 'summary' {of}")
        _check_text(self.install, f"field 'install' {of}")
        for name in ("library", "requires"):
            if getattr(self, name) is not None:
                _check_text(getattr(self, name), f"field {name!r} {of}")
        _check_items(self.variants, tuple, Variant, f"field 'variants' {of}", "(Variant(strategy=..., summary=...),)")
        _check_words(self.devices, DEVICES, f"field 'devices' {of}")
        _check_words(self.precisions, PRECISIONS, f"field 'precisions' {of}")
        _check_items(self.config_keys, frozenset, str, f"field 'config_keys' {of}", "frozenset({'a key'})")
        _check_items(self.environment, tuple, str, f"field 'environment' {of}", "('MYLIBRARY_',)")
        if not (isinstance(self.options, type) and dataclasses.is_dataclass(self.options)):
            raise PluginError(f"field 'options' {of} is a frozen dataclass, the class itself, not {self.options!r}")

    def variants_on(self, device: str) -> tuple[Variant, ...]:
        """Return those variants that run on a kind of device, such as ``"cpu"``."""
        if device not in self.devices:
            return ()
        return tuple(one for one in self.variants if one.devices is None or device in one.devices)


def option(default: Any, doc: str, *, unit: str | None = None) -> Any:
    """Declare a field of an options dataclass: its default, what it does, and its unit.

    The field's annotation is its type: ``bool``, ``int``, ``float``, ``str``, a ``Literal`` of strings or numbers, a
    mapping, or one of them ``| None``.
    """
    return field(default=default, metadata={"doc": doc, "unit": unit})


def option_fields(options: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of an options dataclass by name."""
    return {item.name: item for item in dataclasses.fields(options)}


def _check_text(value: Any, what: str) -> None:
    if not isinstance(value, str):
        raise PluginError(f"{what} is a string, not {value!r}")


def _check_words(value: Any, known: tuple[str, ...], what: str) -> None:
    _check_items(value, frozenset, str, what, f"frozenset({{{known[-1]!r}}})")
    for word in sorted(set(value) - set(known)):
        near = get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PluginError(f"{what} has {word!r}: {hint}known are {', '.join(known)}")


def _check_items(value: Iterable[Any], container: type[Any], kind: type[Any], what: str, example: str) -> None:
    # A string in the place of a container would be taken for its letters.
    if not isinstance(value, container):
        raise PluginError(f"{what} is a {container.__name__}, such as {example}, not {value!r}")
    for item in value:
        if not isinstance(item, kind):
            raise PluginError(f"{what} holds {kind.__name__}s, such as {example}, not {item!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
