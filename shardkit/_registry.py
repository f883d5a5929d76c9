"""Which backends exist: entry points and registered modules, each loaded when it is asked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pluggy

from shardkit._backend import Backend
from shardkit._engine import Engine
from shardkit._finding import Finding
from shardkit._footprint import Footprint
from shardkit._imported import Imported, Source
from shardkit.errors import BackendNotFoundError, MissingLibraryError, PluginError, ShardkitError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardkit._footprint import ModelSize
    from shardkit._strategy import Strategy

BACKENDS = "shardkit.backends"
"""Entry-point group of backends: the entry point's name is the backend's name, its value the plugin's module."""

WRAPPERS = "shardkit.wrappers"
"""Entry-point group of plugins that wrap ``shardkit_prepare`` of every backend."""


@dataclass(frozen=True)
class Claim:
    """Somebody's claim to the name of a backend: an entry point of a distribution, or a registered object."""

    name: str
    origin: str
    plugin: Any = None
    entry_point: importlib.metadata.EntryPoint | None = None

    def load(self) -> Any:
        """Return the plugin, imported if it has to be.

        Raises:
            PluginError: the import fails, or exits the interpreter.
        """
        if self.entry_point is None:
            return self.plugin
        try:
            return self.entry_point.load()
        # A plugin or its library may exit the interpreter at import: one bad plugin must not end the program.
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {self.name!r} ({self.origin}) fails to import: {type(error).__name__}: {error}"
            ) from error


def backends() -> dict[str, Backend]:
    """Return the declarations of all backends that can be described, by name; imports no torch.

    A plugin that is broken, or whose name is claimed twice, is left out: asking for it says why.
    """
    found = {}
    for name in claims():
        try:
            found[name] = describe(name)
        except PluginError:
            continue
    return found


def register(plugin: Any, name: str | None = None) -> None:
    """Add a plugin of this process: a module or object with hook implementations.

    With a ``name`` it is the backend of that name, and must implement both hooks; without, it wraps the hooks of
    other plugins.

    Raises:
        PluginError: the name is taken, or the plugin lacks the hooks.
    """
    if not isinstance(plugin, Hashable):
        raise PluginError(f"a plugin is a module or an object that can be hashed, not {plugin!r}")
    if name is None:
        _manager().register(plugin)
        return
    if name in claims():
        taken = ", ".join(claim.origin for claim in claims()[name])
        raise PluginError(f"the backend name {name!r} is taken by {taken}: register {plugin!r} under another name")
    claim = Claim(name, f"registered object {getattr(plugin, '__name__', plugin)!r}", plugin)
    _load(claim)
    _registered()[name] = claim


def claims() -> dict[str, list[Claim]]:
    """Return all claims to each backend's name, without importing any plugin."""
    found: dict[str, list[Claim]] = {}
    for point in _entry_points(BACKENDS, tuple(sys.path)):
        origin = f"distribution {point.dist.name} {point.dist.version}" if point.dist else "an unnamed distribution"
        others = found.setdefault(point.name, [])
        # One distribution that lies twice on the path (an editable install and its build) is one claim.
        if not any(claim.origin == origin and claim.entry_point == point for claim in others):
            others.append(Claim(point.name, origin, entry_point=point))
    for name, claim in _registered().items():
        found.setdefault(name, []).append(claim)
    return dict(sorted(found.items()))


def describe(name: str) -> Backend:
    """Return the declaration of one backend; imports its plugin and no other.

    Raises:
        BackendNotFoundError: no installed backend has this name.
        PluginError: its plugin is broken, or two distributions claim the name.
    """
    claim = _claim(name)
    plugin = _load(claim)
    declared = _only(plugin).shardkit_describe()
    if not isinstance(declared, Backend):
        raise PluginError(f"shardkit_describe of plugin {name!r} ({claim.origin}) returns a Backend, not {declared!r}")
    if declared.name != name:
        raise PluginError(
            f"plugin {name!r} ({claim.origin}) describes a backend named {declared.name!r}: the two names are one"
        )
    return declared


def diagnose(name: str) -> list[Finding]:
    """Return what the backend's plugin finds on this machine; nothing where it implements no such check.

    Raises:
        PluginError: the plugin is broken, or what comes back are no findings.
    """
    claim = _claim(name)
    found = _only(_load(claim)).shardkit_diagnose()
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, Finding) for item in found):
        raise PluginError(f"shardkit_diagnose of plugin {name!r} ({claim.origin}) returns Findings, not {found!r}")
    return found


def read_other(source: Source) -> Imported | None:
    """Return what a backend's plugin reads of a checkpoint that isn't shardkit's; None if it is none of theirs.

    A plugin that is broken is passed over: its checkpoints aren't known then.

    Raises:
        PluginError: what a plugin gives back isn't what was asked for.
    """
    for name in claims():
        try:
            claim = _claim(name)
            plugin = _load(claim)
        except PluginError:
            continue
        try:
            found = _only(plugin).shardkit_import(source=source)
        except ShardkitError:
            raise
        except Exception as error:
            error.add_note(f"raised by backend {name!r} ({claim.origin}), of {str(source.path)!r}")
            raise
        if found is None:
            continue
        if not isinstance(found, Imported):
            raise PluginError(f"shardkit_import of plugin {name!r} ({claim.origin}) returns Imported, not {found!r}")
        return found
    return None


def require_library(backend: Backend, *, any_version: bool = False) -> None:
    """Raise unless the backend's library can be imported and, but for ``any_version``, is recent enough.

    Does not import it.

    Raises:
        MissingLibraryError: it isn't there, or is older than the plugin was written for.
    """
    if backend.library is None:
        return
    install = f"; install it with: {backend.install}" if backend.install else ""
    if importlib.util.find_spec(backend.library) is None:
        raise MissingLibraryError(f"backend {backend.name!r} needs {backend.library}, which is not installed{install}")
    name, _, least = (backend.requires or "").partition(">=")
    if least and not any_version:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return  # importable without being installed, such as a source tree on the path
        if _release(version) < _release(least):
            raise MissingLibraryError(f"backend {backend.name!r} needs {backend.requires}, not {version}{install}")


def build(name: str, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: Any) -> Engine | None:
    """Return the engine that the backend's plugin builds, through the hook and all its wrappers.

    Raises:
        PluginError: what comes back is no engine, or the library fails to import.
    """
    return _built("shardkit_prepare", name, model=model, optimizer=optimizer, strategy=strategy, options=options)


def control(name: str, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: Any) -> Engine | None:
    """Return the engine that is the backend's library by itself; None where the plugin implements no such thing.

    Raises:
        PluginError: what comes back is no engine, or the library fails to import.
    """
    return _built("shardkit_control", name, model=model, optimizer=optimizer, strategy=strategy, options=options)


def footprint(name: str, model: ModelSize, strategy: Strategy, options: Any) -> Footprint | None:
    """Return what the backend's plugin says its engine would hold in memory; None where it doesn't say.

    Raises:
        PluginError: what comes back is no footprint.
    """
    claim = _claim(name)
    found = _only(_load(claim)).shardkit_footprint(model=model, strategy=strategy, options=options)
    if found is not None and not isinstance(found, Footprint):
        raise PluginError(f"shardkit_footprint of plugin {name!r} ({claim.origin}) returns a Footprint, not {found!r}")
    return found


def has_control(name: str) -> bool:
    """Return whether the backend's plugin can run its library by itself; imports the plugin and not the library."""
    plugin = _load(_claim(name))
    return any(caller.name == "shardkit_control" for caller in _manager().get_hookcallers(plugin) or [])


def _built(hook: str, name: str, **arguments: Any) -> Engine | None:
    claim = _claim(name)
    plugin = _load(claim)
    _load_wrappers()
    try:
        engine = getattr(_only(plugin), hook)(**arguments)
    except SystemExit as error:
        raise PluginError(f"backend {name!r} ({claim.origin}) exits the interpreter with {error.code!r}") from error
    except Exception as error:
        error.add_note(f"raised by backend {name!r} ({claim.origin})")
        raise
    if engine is not None and not isinstance(engine, Engine):
        raise PluginError(f"{hook} of plugin {name!r} ({claim.origin}) returns an Engine, not {engine!r}")
    return engine


def _claim(name: str) -> Claim:
    found = claims()
    if name not in found:
        near = get_close_matches(name, found, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BackendNotFoundError(f"no backend is named {name!r}: {hint}installed are {', '.join(found) or 'none'}")
    if len(found[name]) > 1:
        origins = " and ".join(sorted(claim.origin for claim in found[name]))
        raise PluginError(f"the backend name {name!r} is claimed by {origins}: uninstall all but one")
    return found[name][0]


def _load(claim: Claim) -> Any:
    plugin = claim.load()
    manager = _manager()
    if not manager.is_registered(plugin):
        try:
            manager.register(plugin, name=f"backend {claim.name}")
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {claim.name!r} ({claim.origin}) misdeclares a hook: {error}") from error
        problem = _missing_hooks(plugin)
        if problem:
            manager.unregister(plugin)
            raise PluginError(f"plugin {claim.name!r} ({claim.origin}) {problem}")
    return plugin


def _missing_hooks(plugin: Any) -> str:
    manager = _manager()
    callers = manager.get_hookcallers(plugin) or []
    missing = sorted({"shardkit_describe", "shardkit_prepare"} - {caller.name for caller in callers})
    unknown = sorted(caller.name for caller in callers if not caller.has_spec())
    if unknown:
        return f"implements hooks that do not exist: {', '.join(unknown)}"
    return f"does not implement {' and '.join(missing)}, marked with shardkit.hookimpl" if missing else ""


def _only(plugin: Any) -> Any:
    """Return callers of the hooks for this backend and all wrappers, and for no other backend."""
    manager = _manager()
    others = [
        other
        for other in manager.get_plugins()
        if other is not plugin and (manager.get_name(other) or "").startswith("backend ")
    ]
    hooks = ("describe", "prepare", "control", "footprint", "diagnose", "import")
    return SimpleNamespace(
        **{f"shardkit_{hook}": manager.subset_hook_caller(f"shardkit_{hook}", remove_plugins=others) for hook in hooks}
    )


@cache
def _manager() -> pluggy.PluginManager:
    from shardkit import hookspecs

    manager = pluggy.PluginManager("shardkit")
    manager.add_hookspecs(hookspecs)
    return manager


@cache
def _registered() -> dict[str, Claim]:
    return {}


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of a group; ``path`` is where distributions lie, and reading them all takes a while."""
    return tuple(importlib.metadata.entry_points(group=group))


@cache
def _load_wrappers() -> None:
    for point in _entry_points(WRAPPERS, tuple(sys.path)):
        origin = f"distribution {point.dist.name} {point.dist.version}" if point.dist else "an unnamed distribution"
        wrapper = Claim(point.name, origin, entry_point=point).load()
        if not _manager().is_registered(wrapper):
            _manager().register(wrapper, name=f"wrapper {point.name}")


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release
