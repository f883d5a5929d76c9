"""Whether what a backend declares fits together: its name, its variants and its options."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, Literal, Union

from shardkit._backend import Backend, check_name, option_fields
from shardkit._options import typed_options
from shardkit._strategy import Strategy
from shardkit.errors import PluginError, ShardkitError


@cache
def check(backend: Backend, name: str) -> None:
    """Raise unless a backend that was asked for by ``name`` declares what can be used.

    Raises:
        PluginError: says what is wrong, and what would be right.
    """
    check_name(name)
    if backend.name != name:
        raise PluginError(
            f"it describes a backend named {backend.name!r}: that name and the entry point's, {name!r}, are one"
        )
    for field in ("library", "requires"):
        text = getattr(backend, field)
        if text is not None:
            _check_requirement(text, field)
    _check_options(backend)
    _check_variants(backend)


def _check_requirement(text: str, field: str) -> None:
    if field == "library":
        if not all(part.isidentifier() for part in text.split(".")):
            raise PluginError(f"its field 'library' is the name that the library is imported by, not {text!r}")
        return
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        raise PluginError(
            f"its field 'requires' is a pip requirement, such as 'mylibrary>=1.2', not {text!r}"
        ) from None


def _check_options(backend: Backend) -> None:
    options = backend.options
    what = f"its options {options.__name__}"
    if not options.__dataclass_params__.frozen:
        raise PluginError(f"{what} are a frozen dataclass: write @dataclass(frozen=True)")
    try:
        hints = typing.get_type_hints(options)
    except Exception as error:
        raise PluginError(
            f"the types of {what} can't be read ({type(error).__name__}: {error}): import what they mention where the "
            "module is imported, not under TYPE_CHECKING"
        ) from error
    shared = {item.name for item in dataclasses.fields(Strategy)}
    for name, field in option_fields(options).items():
        if name in shared:
            raise PluginError(f"{what} have {name!r}, which a strategy sets for every backend: name the option else")
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise PluginError(f"option {name!r} of {what} has no default: write {name}: ... = option(default, doc)")
        for choice in _choices(hints[name]):
            if choice is not None and typing.get_origin(choice) is not Literal and not _is_class(choice):
                raise PluginError(
                    f"option {name!r} of {what} is of a type that can't be checked, {choice!r}: use bool, int, float, "
                    "str, a Literal, a Mapping, or one of them | None"
                )
    if backend.config_keys and "config" not in hints:
        raise PluginError(f"it declares config_keys, and {what} have no 'config' to hand such a file over in")


def _check_variants(backend: Backend) -> None:
    if not backend.variants:
        raise PluginError(
            "it declares no variants: one for each way to ask for it, at least Variant(strategy=its name)"
        )
    seen: set[str] = set()
    for variant in backend.variants:
        what = f"its variant {variant.strategy!r}"
        if variant.strategy in seen:
            raise PluginError(f"{what} is declared twice")
        seen.add(variant.strategy)
        try:
            strategy = Strategy.parse(variant.strategy)
            if strategy.backend != backend.name:
                raise PluginError(f"{what} asks for backend {strategy.backend!r}: a variant is of the backend's own")
            typed_options(backend, strategy.options)
        except PluginError:
            raise
        except ShardkitError as error:
            raise PluginError(f"{what} can't be asked for: {error}") from error


def _choices(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _is_class(choice: Any) -> bool:
    return choice is not Any and isinstance(typing.get_origin(choice) or choice, type)
