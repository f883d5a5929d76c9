"""The settings of a workload, ``key=value,key=value``: keyword arguments of the function that makes it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from shardkit._options import convert
from shardkit.errors import InputError, StrategyError


def read(text: str, settings: str) -> dict[str, str]:
    """Return the settings in ``text``, a workload's, as they were written.

    Raises:
        InputError: one isn't ``key=value``, or comes twice.
    """
    found: dict[str, str] = {}
    for part in settings.split(",") if settings else ():
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"settings of a workload read key=value,key=value: {part!r} in {text!r} doesn't")
        if name in found:
            raise InputError(f"workload {text!r} sets {name!r} twice")
        found[name] = value
    return found


def typed(function: Callable[..., Any], settings: Mapping[str, str], what: str) -> dict[str, Any]:
    """Return the settings as the function's parameters are annotated; one without annotation is of its default's type.

    Raises:
        InputError: the function has no such parameter, or the value is of another type; ``what`` names the workload in
            the message.
    """
    if not settings:
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {name: value for name, value in inspect.signature(function).parameters.items() if value.kind in kinds}
    hints = typing.get_type_hints(function.func if isinstance(function, partial) else function)
    values = {}
    for name, value in settings.items():
        if name not in parameters:
            near = get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = f"its settings are {', '.join(parameters)}" if parameters else "it has none"
            raise InputError(f"{what} has no setting {name!r}: {hint}{known}")
        default = parameters[name].default
        plain = str if default is None or default is inspect.Parameter.empty else type(default)
        try:
            values[name] = convert(value, hints.get(name, plain), f"setting {name!r} of {what}", text=True)
        except StrategyError as error:
            raise InputError(str(error)) from None
    return values


def require_all(function: Callable[..., Any], what: str) -> None:
    """Raise unless a function can be called without arguments.

    Raises:
        InputError: it needs one; ``what`` names the workload in the message.
    """
    for name, value in inspect.signature(function).parameters.items():
        if value.default is value.empty and value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD):
            raise InputError(f"{what} needs a value for its setting {name!r}: write :{name}=... after its name")


def between(low: float, high: float, **values: float) -> None:
    """Raise unless the values lie between two others, both allowed.

    Raises:
        InputError: one doesn't.
    """
    for name, value in values.items():
        if not low <= value <= high:
            bounds = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            raise InputError(f"{name} of the workload is {bounds}, not {value}")
