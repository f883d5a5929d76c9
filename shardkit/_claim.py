"""Who brings a plugin, and what its import came to."""

from __future__ import annotations

import importlib.metadata
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardkit.errors import PluginError

BACKENDS = "shardkit.backends"
"""Entry-point group of backends: the entry point's name is the backend's name, its value the plugin's module."""

WRAPPERS = "shardkit.wrappers"
"""Entry-point group of plugins that wrap ``shardkit_prepare`` of every backend."""


@dataclass(frozen=True)
class Claim:
    """Somebody's claim to a backend's or wrapper's name: an entry point of a distribution, or a registered object."""

    name: str
    origin: str
    plugin: Any = None
    entry_point: importlib.metadata.EntryPoint | None = None
    kind: str = "plugin"
    distribution: str | None = None
    """What pip calls what brings it, where that is known."""

    @property
    def title(self) -> str:
        """The plugin and where it comes from, as the start of an error."""
        return f"{self.kind} {self.name!r} ({self.origin})"

    @property
    def remedy(self) -> str:
        """What somebody who didn't write the plugin can do about it."""
        if self.entry_point is None:
            return "mend what registers it"
        if self.distribution is None:
            return "report it to its authors, or remove what brings it"
        name = self.distribution
        return f"update it (pip install -U {name}), report it to its authors, or uninstall it (pip uninstall {name})"

    def error(self, problem: str, remedy: str | None = None) -> PluginError:
        """Return an error that names the plugin, its distribution and version, and what to do."""
        return PluginError(f"{self.title} {problem}; {remedy or self.remedy}")

    def load(self) -> Any:
        """Return the plugin, imported if it has to be.

        Raises:
            PluginError: it needs another shardkit, its import fails, or it exits the interpreter.
        """
        if self.entry_point is None:
            return self.plugin
        if self.distribution is not None and self.entry_point.dist is not None:
            wanted = _unmet(self.entry_point.dist)
            if wanted is not None:
                raise self.error(*wanted)
        try:
            return self.entry_point.load()
        except KeyboardInterrupt:
            raise
        # A plugin or its library may exit the interpreter at import: one bad plugin must not end the program.
        except BaseException as error:
            raise self.error(*self._why(error)) from error

    def _why(self, error: BaseException) -> tuple[str, str | None]:
        """Return what is wrong when the plugin can't be imported, and what to do if that is known."""
        from shardkit import __version__

        assert self.entry_point is not None
        told = f"{type(error).__name__}: {error}"
        match = self.entry_point.pattern.match(self.entry_point.value)
        if match is None:
            return f"has an entry point that reads {self.entry_point.value!r}, not 'module' or 'module:object'", None
        module, attribute = match["module"], match["attr"]
        missing = error.name if isinstance(error, ImportError | AttributeError) else None
        if isinstance(error, ModuleNotFoundError) and missing and f"{module}.".startswith(f"{missing}."):
            return f"has an entry point to the module {module!r}, and there is no {missing!r} ({told})", None
        if isinstance(error, AttributeError) and attribute and missing in attribute.split("."):
            loaded = sys.modules.get(module)
            if loaded is not None and not hasattr(loaded, attribute.partition(".")[0]):
                return f"has an entry point to {self.entry_point.value!r}, and the module has no {attribute!r}", None
        if _lacks(error, missing):
            return (
                f"fails to import, as if written for another version than this shardkit {__version__} ({told})",
                f"update both: pip install -U shardkit {self.distribution or ''}".rstrip(),
            )
        if isinstance(error, SystemExit):
            return f"fails to import: it exits the interpreter ({told})", None
        return f"fails to import: {told}", None


def installed(group: str) -> tuple[Claim, ...]:
    """Return the claims that distributions on the path make with entry points of a group, without importing any."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[Claim, ...]:
    # Distributions lie on the path, and reading them all takes a while.
    found: list[Claim] = []
    for point in importlib.metadata.entry_points(group=group):
        origin, name = _origin(point)
        # One distribution that lies twice on the path (an editable install and its build) is one claim.
        if not any(claim.origin == origin and claim.entry_point == point for claim in found):
            kind = "wrapper" if group == WRAPPERS else "plugin"
            found.append(Claim(point.name, origin, entry_point=point, kind=kind, distribution=name))
    return tuple(found)


def _origin(point: importlib.metadata.EntryPoint) -> tuple[str, str | None]:
    """Return the distribution that an entry point is of, in words, and its name."""
    name = version = None
    # What pip or a hand left half removed has no metadata to read.
    with suppress(Exception):
        name, version = point.dist.name, point.dist.version  # type: ignore[union-attr]
    if not name:
        return f"a distribution without a name, at {getattr(point.dist, '_path', 'an unknown place')}", None
    return f"distribution {name} {version}", name


def _lacks(error: BaseException, missing: str | None) -> bool:
    """Return whether an import failed since this shardkit lacks a module or a name."""
    if isinstance(error, ImportError):
        return missing is not None and missing.partition(".")[0] == "shardkit"
    return isinstance(error, AttributeError) and str(error).startswith("module 'shardkit")


@cache
def _unmet(distribution: importlib.metadata.Distribution) -> tuple[str, str] | None:
    """Return what a distribution asks of shardkit's version that this one isn't, and what to do; None if it fits."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import Version

    from shardkit import __version__

    if distribution.name == "shardkit":
        return None
    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.name.lower() != "shardkit" or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        # A release is there once what leads to it is: 0.2.0.dev1 passes for 0.2.
        if not wanted.specifier.contains(Version(__version__).base_version, prereleases=True):
            install = f'pip install -U "shardkit{wanted.specifier}"'
            return (
                f"needs shardkit{wanted.specifier}, and this is shardkit {__version__}",
                f"install one that fits ({install}), or another version of {distribution.name}",
            )
    return None
