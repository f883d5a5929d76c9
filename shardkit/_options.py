"""From what a user wrote to the typed options that a backend declared."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union

from shardkit._backend import Backend, option_fields
from shardkit.errors import StrategyError


def typed_options(backend: Backend, given: Mapping[str, Any]) -> Any:
    """Return the backend's options dataclass filled with what was given; text is read as the field's type.

    Raises:
        StrategyError: an option is unknown, of another type, or refused by the dataclass itself.
    """
    fields = option_fields(backend.options)
    for name in given:
        if name not in fields:
            near = get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = f"its options are {', '.join(sorted(fields))}" if fields else "it has none"
            raise StrategyError(f"backend {backend.name!r} has no option {name!r}: {hint}{known}")
    hints = typing.get_type_hints(backend.options)
    values = {
        name: convert(value, hints[name], f"option {name!r} of backend {backend.name!r}", text=True)
        for name, value in given.items()
    }
    return backend.options(**values)


def convert(value: Any, annotation: Any, what: str, *, text: bool) -> Any:
    """Return ``value`` as the annotated type; where ``text`` is true a string is read as that type.

    A whole number passes for a float, and nothing else for anything it isn't: no truth values for numbers.

    Raises:
        StrategyError: it can't be; ``what`` names the setting in the message.
    """
    if isinstance(annotation, str):
        annotation = typing.get_type_hints(_Holder.of(annotation))["value"]
    choices = _choices(annotation)
    for choice in choices:
        try:
            return _as(value, choice, text)
        except ValueError:
            continue
    raise StrategyError(f"{what} is {_described(choices)}, not {value!r}")


def type_name(annotation: Any) -> str:
    """Return an annotation in a user's words, such as ``"a whole number or None"``."""
    return _described(_choices(annotation))


class _Holder:
    @staticmethod
    def of(annotation: str) -> type[Any]:
        return type("Holder", (), {"__annotations__": {"value": annotation}, "__module__": __name__})


def _choices(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        # None first: the text "none" is no value of another type.
        return tuple(sorted(typing.get_args(annotation), key=lambda choice: choice is not types.NoneType))
    return (annotation,)


def _as(value: Any, choice: Any, text: bool) -> Any:
    read = text and isinstance(value, str)
    if choice is types.NoneType:
        if value is None or (read and value.lower() in ("none", "null")):
            return None
    elif typing.get_origin(choice) is Literal:
        for allowed in typing.get_args(choice):
            if type(value) is type(allowed) and value == allowed:
                return allowed
            if read and value.lower() == str(allowed).lower():
                return allowed
    elif choice is bool:
        if isinstance(value, bool):
            return value
        if read and value.lower() in _TRUTHS:
            return _TRUTHS[value.lower()]
    elif choice is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if read:
            number = float(value)
            # 5e8 is how people write the sizes of buckets.
            return int(value) if value.lstrip("+-").isdecimal() else _whole(number)
    elif choice is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if read:
            return float(value)
    elif choice is str:
        if isinstance(value, str):
            return value
    elif isinstance(value, typing.get_origin(choice) or choice):
        return value
    raise ValueError(value)


_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)


def _described(choices: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", types.NoneType: "None"}
    texts = []
    for choice in sorted(choices, key=lambda choice: choice is types.NoneType):
        if typing.get_origin(choice) is Literal:
            texts.append("one of " + ", ".join(repr(allowed) for allowed in typing.get_args(choice)))
        else:
            plain = typing.get_origin(choice) or choice
            texts.append(words.get(plain, f"a {getattr(plain, '__name__', plain)}".lower()))
    return " or ".join(texts)
