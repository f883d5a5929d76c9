"""Which backends exist: entry points and registered modules, each loaded when it is asked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from shardkit._backend import Backend, check_name
from shardkit._calls import call, guarded, traced
from shardkit._claim import BACKENDS, Claim, installed
from shardkit._declaration import check
from shardkit._engine import Engine
from shardkit._finding import Finding
from shardkit._footprint import Footprint
from shardkit._imported import Imported, Source
from shardkit._plugins import implements
from shardkit._plugins import load as load
from shardkit._plugins import load_wrappers as load_wrappers
from shardkit._plugins import manager as _manager
from shardkit._plugins import wrappers as wrappers
from shardkit.errors import BackendNotFoundError, MissingLibraryError, PluginError, ShardkitError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardkit._footprint import ModelSize
    from shardkit._strategy import Strategy


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

    With a ``name`` it is the backend of that name, and must implement both hooks; without, it wraps
    ``shardkit_prepare`` of every backend.

    Raises:
        PluginError: the name is taken, or the plugin lacks the hooks.
    """
    if not isinstance(plugin, Hashable):
        raise PluginError(f"a plugin is a module or an object that can be hashed, not {plugin!r}")
    told = getattr(plugin, "__name__", None) or repr(plugin)
    if name is None:
        if not _manager().is_registered(plugin):
            load(Claim(told, "registered in this process", plugin, kind="wrapper"))
        return
    check_name(name)
    if name in claims():
        taken = ", ".join(claim.origin for claim in claims()[name])
        raise PluginError(f"the backend name {name!r} is taken by {taken}: register {plugin!r} under another name")
    claim = Claim(name, f"registered object {told!r}", plugin)
    load(claim)
    _registered()[name] = claim


def claims() -> dict[str, list[Claim]]:
    """Return all claims to each backend's name, without importing any plugin."""
    found: dict[str, list[Claim]] = {}
    for claim in installed(BACKENDS):
        found.setdefault(claim.name, []).append(claim)
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
    declared = guarded(claim, "shardkit_describe")
    if not isinstance(declared, Backend):
        raise claim.error(f"returns {declared!r} from its shardkit_describe, which returns a Backend")
    try:
        check(declared, name)
    except PluginError as error:
        raise claim.error(f"misdeclares itself in its shardkit_describe: {error}") from error
    return declared


def diagnose(name: str) -> list[Finding]:
    """Return what the backend's plugin finds on this machine; nothing where it implements no such check.

    Raises:
        PluginError: the plugin is broken, or what comes back are no findings.
    """
    claim = _claim(name)
    found = call(claim, "shardkit_diagnose")
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, Finding) for item in found):
        raise claim.error(f"returns {found!r} from its shardkit_diagnose, which returns a list of Findings")
    return found


def read_other(source: Source) -> Imported | None:
    """Return what a backend's plugin reads of a checkpoint that isn't shardkit's; None if it is none of theirs.

    A plugin that can't be loaded is passed over: its checkpoints aren't known then. So is one whose reading fails by a
    mistake of its own, if another one reads the source.

    Raises:
        PluginError: what a plugin gives back isn't what was asked for.
    """
    mistakes: list[Exception] = []
    for name in claims():
        try:
            claim = _claim(name)
            load(claim)
        except PluginError:
            continue
        try:
            found = call(claim, "shardkit_import", source=source)
            if found is not None and not isinstance(found, Imported):
                raise claim.error(f"returns {found!r} from its shardkit_import, which returns Imported, or None")
        except Exception as error:
            if isinstance(error, ShardkitError) and not isinstance(error, PluginError):
                raise
            error.add_note(f"while it read {str(source.path)!r}")
            mistakes.append(error)
            continue
        if found is not None:
            return found
    if mistakes:
        raise mistakes[0]
    return None


def require_library(backend: Backend, *, any_version: bool = False) -> None:
    """Raise unless the backend's library can be imported and, but for ``any_version``, is recent enough.

    Does not import it.

    Raises:
        MissingLibraryError: it isn't there, or is older than the plugin was written for.
    """
    if backend.library is not None:
        requires = None if any_version else backend.requires
        require_installed(f"backend {backend.name!r}", backend.library, requires, backend.install)


def require_installed(who: str, library: str, requires: str | None, install: str | None) -> None:
    """Raise unless the module ``library`` can be imported, and its distribution is as ``requires`` says.

    Raises:
        MissingLibraryError: it isn't there, or is older; says who needs it, and how to install it.
    """
    install = f"; install it with: {install}" if install else ""
    if importlib.util.find_spec(library) is None:
        raise MissingLibraryError(f"{who} needs {library}, which is not installed{install}")
    if requires is None:
        return
    from packaging.requirements import Requirement
    from packaging.version import Version

    wanted = Requirement(requires)
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return  # importable without being installed, such as a source tree on the path
    # A release candidate and a build of one's own have what the release has.
    if not wanted.specifier.contains(Version(version).base_version, prereleases=True):
        raise MissingLibraryError(f"{who} needs {requires}, not {version}{install}")


def build(name: str, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: Any) -> Engine | None:
    """Return the engine that the backend's plugin builds, through the hook and all its wrappers.

    Raises:
        PluginError: what comes back is no engine, or lacks what every engine has.
    """
    hook = "shardkit_prepare"
    engine, giver = _built(hook, name, model=model, optimizer=optimizer, strategy=strategy, options=options)
    if engine is None and optimizer is not None:
        raise _claim(name).error(
            f"returns None from its {hook}, for an optimizer that it was given",
            "it returns an Engine, or raises UnsupportedError to refuse; report it to its authors",
        )
    problem = None if engine is None else _problem(engine)
    if problem:
        raise PluginError(f"{giver} returns a {type(engine).__name__} {problem}")
    return engine


def _problem(engine: Engine) -> str | None:
    """Return what an engine lacks, as the end of a sentence."""
    from torch import nn
    from torch.optim import Optimizer

    held = getattr(engine, "model", None)
    if not isinstance(held, nn.Module):
        return f"whose 'model' is {held!r}: set self.model to the module that the user is to call"
    held = getattr(engine, "optimizer", engine)
    if held is engine or not isinstance(held, Optimizer | None):
        told = "missing" if held is engine else repr(held)
        return f"whose 'optimizer' is {told}: set self.optimizer to a torch optimizer, or to None"
    words = ("window", "backward", "forward")
    if engine.lockstep not in words:
        return f"whose 'lockstep' is {engine.lockstep!r}: it is one of {', '.join(words)}"
    return None


def control(name: str, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: Any) -> Engine | None:
    """Return the engine that is the backend's library by itself; None where the plugin implements no such thing.

    Raises:
        PluginError: what comes back is no engine, or the library fails to import.
    """
    return _built("shardkit_control", name, model=model, optimizer=optimizer, strategy=strategy, options=options)[0]


def footprint(name: str, model: ModelSize, strategy: Strategy, options: Any) -> Footprint | None:
    """Return what the backend's plugin says its engine would hold in memory; None where it doesn't say.

    Raises:
        PluginError: what comes back is no footprint.
    """
    claim = _claim(name)
    arguments = {"model": model, "strategy": strategy, "options": options}
    found = guarded(claim, "shardkit_footprint", refuses=True, **arguments)
    if found is not None and not isinstance(found, Footprint):
        raise claim.error(f"returns {found!r} from its shardkit_footprint, which returns a Footprint, or None")
    return found


@contextmanager
def blaming(name: str, hook: str) -> Iterator[None]:
    """Return a context in which what a hook of the backend returned is asked for more: what goes wrong is its fault.

    Raises:
        PluginError: something was raised that isn't of shardkit's tree.
    """
    try:
        yield
    except ShardkitError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise _claim(name).error(f"returns from its {hook} what doesn't work ({told})") from error


def has_control(name: str) -> bool:
    """Return whether the backend's plugin can run its library by itself; imports the plugin and not the library."""
    return implements(load(_claim(name)), "shardkit_control")


def _built(hook: str, name: str, **arguments: Any) -> tuple[Engine | None, str]:
    """Return what a hook gives, and who gave it."""
    load_wrappers()
    claim = _claim(name)
    engine, giver = traced(claim, hook, **arguments)
    if engine is not None and not isinstance(engine, Engine):
        raise PluginError(f"{giver} returns {engine!r}, which is no Engine; {claim.remedy}")
    return engine, giver


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


@cache
def _registered() -> dict[str, Claim]:
    return {}
