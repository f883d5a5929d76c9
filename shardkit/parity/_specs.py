"""What one side of an upgrade is made of: packages, each in one version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from shardkit.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Spec:
    """A package in one version; ``installed`` if it was asked for as it is installed, whatever version that is."""

    name: str
    version: str
    installed: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.version}{' (installed)' if self.installed else ''}"


@dataclass(frozen=True)
class Specs:
    """One side of an upgrade, in the order in which it was written."""

    packages: tuple[Spec, ...]

    def __iter__(self) -> Iterator[Spec]:
        return iter(self.packages)

    def __str__(self) -> str:
        return ", ".join(map(str, self.packages))


def parse_specs(text: str) -> Specs:
    """Read one side, such as ``"torch==2.13.0,numpy==installed"``.

    Raises:
        InputError: nothing is named, a package twice, or one that isn't installed as installed; a version isn't one;
            another operator than ``==``.
    """
    packages: dict[str, Spec] = {}
    for entry in filter(None, re.split(r"[,\s]+", re.sub(r"\s*([=<>!~]+)\s*", r"\1", text))):
        spec = _spec(entry)
        if spec.name in packages:
            raise InputError(f"{text!r} names {spec.name} twice")
        packages[spec.name] = spec
    if not packages:
        raise InputError(f"{text!r} names no package: write name==version, or name==installed")
    return Specs(tuple(packages.values()))


def pair(before: Specs, after: Specs) -> tuple[Specs, Specs]:
    """Return both sides, the second in the order of the first. They may be the same: a control.

    Raises:
        InputError: one side names a package that the other doesn't.
    """
    for one, other in ((before, after), (after, before)):
        missing = {spec.name for spec in one} - {spec.name for spec in other}
        if missing:
            name = sorted(missing)[0]
            raise InputError(
                f"both sides must name the same packages: {name} is in {str(one)!r} but not in {str(other)!r}; "
                f"write {name}==installed where it shall stay as it is"
            )
    found = {spec.name: spec for spec in after}
    return before, Specs(tuple(found[spec.name] for spec in before))


def check_name(name: str) -> str:
    """Return a package's name as the index knows it.

    Raises:
        InputError: it can't be one.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no package's name")
    return canonicalize_name(name)


def installed_version(name: str) -> str | None:
    """Return the version of a package that this process could import; ``None`` if it isn't installed."""
    try:
        # Half-removed packages have metadata without a version.
        found: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    return found


def _spec(entry: str) -> Spec:
    written, operator, version = re.fullmatch(r"([^=<>!~]*)([=<>!~]*)(.*)", entry, re.DOTALL).groups()  # type: ignore[union-attr]
    if operator not in ("", "=="):
        raise InputError(f"{entry!r}: one version, so {written or 'name'}==version, not {operator}")
    name = check_name(written)
    if name == "shardkit":
        raise InputError(f"{entry!r}: shardkit is what compares; it can't be one of the packages that differ")
    if operator == "":
        raise InputError(
            f"{entry!r} says no version: write {name}==version, or {name}==installed for the one that is there"
        )
    if version == "installed":
        found = installed_version(name)
        if found is None:
            raise InputError(f"{name} isn't installed, so say which version: {name}==version")
        return Spec(name, found, installed=True)
    try:
        return Spec(name, str(Version(version)))
    except InvalidVersion:
        raise InputError(f"{entry!r}: {version!r} is no version, such as 1.2.3, nor 'installed'") from None
