"""The backends that are installed or could be, and the options of one, as data and as tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import typing
from typing import TYPE_CHECKING, Any

from shardkit import _registry
from shardkit._backend import PARTS, PRECISIONS, Backend, option_fields
from shardkit._options import type_name
from shardkit.errors import MissingLibraryError, PluginError

if TYPE_CHECKING:
    from rich.table import Table


def listing() -> list[dict[str, Any]]:
    """Return what is known of each backend, in plain data; imports no backend's library.

    ``problem`` is why it can't be used as it stands, and empty for one that can.
    """
    found: list[dict[str, Any]] = []
    for name, claims in _registry.claims().items():
        origin = ", ".join(claim.origin for claim in claims)
        try:
            backend = _registry.describe(name)
        except PluginError as error:
            found.append({"name": name, "origin": origin, "installed": False, "problem": str(error), "variants": []})
            continue
        try:
            _registry.require_library(backend)
            problem = ""
        except MissingLibraryError as error:
            problem = str(error)
        found.append({"name": name, "origin": origin, "installed": not problem, "problem": problem, **_facts(backend)})
    return found


def wrappers() -> list[str]:
    """Return a line for each installed plugin that wraps all backends, or why it can't."""
    found = []
    for claim in _registry.wrappers():
        try:
            _registry.load(claim)
            found.append(f"every backend is wrapped by {claim.name} ({claim.origin})")
        except PluginError as error:
            found.append(f"no backend can be used: {error}")
    return found


def options(name: str) -> list[dict[str, Any]]:
    """Return the options of one backend, in plain data.

    Raises:
        BackendNotFoundError: no installed backend has this name.
        PluginError: its plugin is broken.
    """
    backend = _registry.describe(name)
    hints = typing.get_type_hints(backend.options)
    return [
        {
            "name": field.name,
            "type": type_name(hints[field.name]),
            "default": _default(field),
            "unit": field.metadata.get("unit"),
            "doc": field.metadata.get("doc", ""),
        }
        for field in option_fields(backend.options).values()
    ]


def tables(found: list[dict[str, Any]]) -> list[Any]:
    """Return a table with a row for each variant, one of the libraries, and how to mend what can't be used."""
    from rich.text import Text

    variants = make_table("strategy", "shards", "in host memory", "what it is")
    libraries = make_table("backend", "library", "devices", "precisions", "brought by")
    problems = []
    for backend in found:
        name = backend["name"]
        if backend["problem"]:
            problems.append(Text.assemble((f"{name}: ", "bold"), backend["problem"]))
        for variant in backend["variants"]:
            parts = (", ".join(variant[key]) or "-" for key in ("shards", "offloads"))
            only = f"on {', '.join(variant['devices'])} only: " if variant["devices"] != backend["devices"] else ""
            row = (variant["strategy"].replace(",", ",\n  "), *parts, only + variant["summary"])
            variants.add_row(*(Text(text, "" if backend["installed"] else "dim") for text in row))
        used = f"{backend['library']} {backend['version'] or ''}" if backend.get("library") else "torch alone"
        lists = (", ".join(backend.get(key, [])) for key in ("devices", "precisions"))
        row = (name, "not usable, see below" if backend["problem"] else used, *lists, backend["origin"])
        libraries.add_row(*(Text(text) for text in row))
    hint = Text("shardkit backends NAME lists the options of one.", "dim")
    return [variants, libraries, *problems, hint]


def option_tables(found: list[dict[str, Any]]) -> list[Any]:
    """Return the options as a table."""
    from rich.text import Text

    if not found:
        return [Text("This backend has no options.")]
    table = make_table("option", "type", "default", "unit", "what it does")
    for option in found:
        texts = (option["name"], option["type"], str(option["default"]), option["unit"] or "", option["doc"])
        table.add_row(*(Text(text) for text in texts))
    return [table]


def _facts(backend: Backend) -> dict[str, Any]:
    return {
        "summary": backend.summary,
        "library": backend.library,
        "requires": backend.requires,
        "version": _version(backend),
        "install": backend.install,
        "devices": sorted(backend.devices),
        "precisions": [name for name in PRECISIONS if name in backend.precisions],
        "variants": [
            {
                "strategy": variant.strategy,
                "summary": variant.summary,
                "shards": [part for part in PARTS if part in variant.shards],
                "offloads": [part for part in PARTS if part in variant.offloads],
                "devices": sorted(backend.devices if variant.devices is None else variant.devices),
                "elsewhere": variant.elsewhere,
            }
            for variant in backend.variants
        ],
    }


def _version(backend: Backend) -> str | None:
    """Return the version of the library's distribution, None where it isn't installed as one."""
    if backend.library is None:
        return None
    try:
        return importlib.metadata.version(distribution(backend))
    except importlib.metadata.PackageNotFoundError:
        return None


def distribution(backend: Backend) -> str:
    """Return the name under which pip knows the backend's library."""
    return re.split(r"[\s<>=!~;\[]", backend.requires or backend.library or "torch", maxsplit=1)[0]


def versions() -> dict[str, str]:
    """Return the installed versions that figures depend on: Python, shardkit, torch, transformers, the libraries."""
    found = {"python": platform.python_version()}
    wanted = ["shardkit", "torch", "transformers"]
    for backend in _registry.backends().values():
        if backend.requires:
            wanted.append(distribution(backend))
    for name in wanted:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def make_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place == 0)
    return table
