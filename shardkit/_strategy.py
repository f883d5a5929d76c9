"""The strategy: which backend trains the model, and the numerics that every backend shares."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardkit._options import convert
from shardkit.errors import StrategyError


@dataclass(frozen=True)
class Strategy:
    """What to train with. Accumulation, clipping and seeds mean the same under every backend.

    ``backend`` is the name of an installed backend, and ``options`` are its own (``shardkit backends NAME`` lists
    them). ``accumulate`` micro-batches make one step. ``max_grad_norm`` clips the global L2 norm of the averaged
    gradient, once per step. ``track_grad_norm`` makes ``session.grad_norm`` available without clipping.
    ``precision`` is ``"fp32"``, ``"bf16"`` or ``"fp16"``, where the backend declares it: weights, gradients and
    optimizer state are float32 in each, and the module's forward runs in autocast. An fp16 loss is multiplied by
    ``loss_scale``, which halves when a gradient of any rank overflows (the step is skipped) and doubles after
    ``loss_scale_window`` steps without. ``seed`` seeds Python's,
    NumPy's and torch's generators at ``prepare`` with ``seed + rank``, so that ranks draw different dropout masks.
    ``on_nonfinite`` says what a step does when a loss or gradient of any rank is infinite or NaN: ``"raise"`` an error
    on every rank, or ``"skip"`` the step on every rank; the weights stay as they were in both. In fp16 it holds once
    the loss scale can't fall any further.

    Raises:
        StrategyError: a field is out of range or of another type.
    """

    backend: str
    accumulate: int = field(default=1, kw_only=True)
    max_grad_norm: float | None = field(default=None, kw_only=True)
    track_grad_norm: bool = field(default=False, kw_only=True)
    precision: str = field(default="fp32", kw_only=True)
    loss_scale: float = field(default=2.0**16, kw_only=True)
    loss_scale_window: int = field(default=2000, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    on_nonfinite: str = field(default="raise", kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if item.name != "options":
                value = convert(getattr(self, item.name), item.type, f"strategy field {item.name!r}", text=False)
                object.__setattr__(self, item.name, value)
        if not isinstance(self.options, Mapping):
            raise StrategyError(f"strategy field 'options' is a mapping of names to values, not {self.options!r}")
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        if not self.backend:
            raise StrategyError("strategy field 'backend' is the name of a backend, not an empty string")
        if self.accumulate < 1:
            raise StrategyError(f"strategy field 'accumulate' is at least 1, not {self.accumulate}")
        if self.max_grad_norm is not None and not (self.max_grad_norm > 0 and math.isfinite(self.max_grad_norm)):
            raise StrategyError(
                f"strategy field 'max_grad_norm' is above 0 and finite, or None to not clip, not {self.max_grad_norm}"
            )
        if self.precision not in _PRECISIONS:
            raise StrategyError(f"strategy field 'precision' is one of {_PRECISIONS}, not {self.precision!r}")
        if not (self.loss_scale >= 1 and math.isfinite(self.loss_scale)):
            raise StrategyError(f"strategy field 'loss_scale' is finite and at least 1, not {self.loss_scale}")
        if self.loss_scale_window < 1:
            raise StrategyError(f"strategy field 'loss_scale_window' is at least 1 step, not {self.loss_scale_window}")
        if self.on_nonfinite not in _NONFINITE:
            raise StrategyError(f"strategy field 'on_nonfinite' is one of {_NONFINITE}, not {self.on_nonfinite!r}")
        if self.seed is not None and not 0 <= self.seed < 2**32 - 2**16:
            raise StrategyError(f"strategy field 'seed' is from 0 to 2**32 - 2**16, not {self.seed}")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return _rebuild, ({**values, "options": dict(self.options)},)

    def __str__(self) -> str:
        """Return the shortest string that :meth:`parse` turns into this strategy, where one exists."""
        changed = [
            (item.name, getattr(self, item.name))
            for item in dataclasses.fields(self)
            if item.name not in ("backend", "options") and getattr(self, item.name) != item.default
        ]
        settings = ",".join(f"{name}={value}" for name, value in [*self.options.items(), *changed])
        return f"{self.backend}:{settings}" if settings else self.backend

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``"backend"`` or ``"backend:name=value,name=value"``.

        A name is a field of the strategy (``accumulate=4``) or an option of the backend (``stage=3``).

        Raises:
            StrategyError: the text has another form, or names a setting twice.
        """
        backend, colon, settings = text.partition(":")
        backend = backend.strip()
        if not backend or (colon and not settings.strip()):
            raise StrategyError(f"a strategy reads 'backend' or 'backend:name=value,name=value', not {text!r}")
        fields: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for setting in settings.split(",") if settings else []:
            name, equals, value = (part.strip() for part in setting.partition("="))
            if not equals or not name or not value:
                raise StrategyError(f"setting {setting!r} of strategy {text!r} does not read 'name=value'")
            if name in fields or name in options:
                raise StrategyError(f"strategy {text!r} sets {name!r} twice")
            if name in _FIELDS:
                fields[name] = convert(value, _FIELDS[name].type, f"strategy field {name!r}", text=True)
            else:
                options[name] = value
        return cls(backend, options=options, **fields)

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy from a JSON or TOML file: a table of this class's fields, ``options`` a table of its own.

        Raises:
            StrategyError: the file is missing, is neither JSON nor TOML, or has unknown keys.
        """
        return cls.from_mapping(read_file(path), str(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> Strategy:
        """Make a strategy of a table of its fields; ``source`` says where it stood, for errors."""
        if "backend" not in values:
            raise StrategyError(f"{source}: a strategy file names its 'backend'; it has only {sorted(values)}")
        known = [*_FIELDS, "backend", "options"]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise StrategyError(f"{source}: unknown {_listed(unknown, known)}; known are {', '.join(sorted(known))}")
        if not isinstance(values["backend"], str):
            raise StrategyError(f"{source}: 'backend' is the name of a backend, not {values['backend']!r}")
        try:
            return cls(**values)
        except StrategyError as error:
            raise StrategyError(f"{source}: {error}") from None


_PRECISIONS = ("fp32", "bf16", "fp16")
_NONFINITE = ("raise", "skip")
_FIELDS = {item.name: item for item in dataclasses.fields(Strategy) if item.name not in ("backend", "options")}


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the table that a JSON or TOML file holds.

    Raises:
        StrategyError: the file is missing, isn't what its name says, or holds no table.
    """
    path = Path(path)
    read = tomllib.loads if path.suffix == ".toml" else json.loads
    try:
        values = read(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise StrategyError(f"there is no strategy file {str(path)!r}") from None
    except OSError as error:
        raise StrategyError(f"can't read strategy file {str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # of json, tomllib and of the decoding alike
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise StrategyError(f"strategy file {str(path)!r} is not {kind}: {error}") from None
    if not isinstance(values, dict):
        raise StrategyError(f"strategy file {str(path)!r} holds a {type(values).__name__}, not a table of settings")
    return values


def is_path(text: str) -> bool:
    """Return whether a strategy given as text is the path of a file."""
    return Path(text.strip()).suffix in (".json", ".toml") and "=" not in text.partition(":")[2]


def _listed(unknown: list[str], known: list[str]) -> str:
    texts = []
    for key in unknown:
        near = get_close_matches(str(key), known, n=1)
        texts.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return ("key " if len(texts) == 1 else "keys ") + ", ".join(texts)


def _rebuild(values: dict[str, Any]) -> Strategy:
    return Strategy(values.pop("backend"), **values)
