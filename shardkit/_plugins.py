"""The plugins that are loaded: known to pluggy, with hooks that exist."""

from __future__ import annotations

import sys
from collections.abc import Generator
from functools import cache
from typing import Any, final

import pluggy

from shardkit._claim import WRAPPERS, Claim, installed
from shardkit._hookimpl import hookimpl
from shardkit._implementations import check_plugin, hooks_of


@cache
def manager() -> pluggy.PluginManager:
    """Return what knows the hooks and all plugins that are loaded."""
    from shardkit import hookspecs

    made = pluggy.PluginManager("shardkit")
    made.add_hookspecs(hookspecs)
    made.register(seen(), name="shardkit's own")
    return made


def implements(plugin: Any, hook: str) -> bool:
    """Return whether a plugin has a hook."""
    return any(found.hook == hook for found in hooks_of(plugin, manager()))


def load(claim: Claim) -> Any:
    """Return the plugin of a claim, its hooks checked and known to the manager.

    Raises:
        PluginError: it can't be imported, or its hooks aren't those that exist.
    """
    plugin = claim.load()
    if manager().is_registered(plugin):
        return plugin
    try:
        check_plugin(claim, plugin, manager())
        if claim.kind == "wrapper":
            name = f"wrapper {len(_loaded())}"
            _loaded()[name] = claim
        else:
            name = f"backend {claim.name}"
            if manager().get_plugin(name) is not None:
                # Of the same name, from where the path no longer leads.
                manager().unregister(name=name)
        manager().register(plugin, name=name)
    except pluggy.PluginValidationError as error:
        raise claim.error(f"misdeclares a hook ({' '.join(str(error).split())})") from error
    return plugin


def wrappers() -> tuple[Claim, ...]:
    """Return the installed plugins that wrap the hooks of backends; imports none."""
    return installed(WRAPPERS)


def load_wrappers() -> None:
    """Load the installed wrappers: before an engine is built, for others import none of them.

    Raises:
        PluginError: one is broken. It would be left out without a word otherwise, of every backend's engine.
    """
    _load_wrappers(tuple(sys.path))


@cache
def _load_wrappers(path: tuple[str, ...]) -> None:
    for claim in wrappers():
        load(claim)


@final
class Seen:
    """Sees what a backend's own implementation returned, within all wrappers."""

    result: Any = None

    # The innermost: of those that are marked so the first to be registered.
    @hookimpl(wrapper=True, trylast=True)
    def shardkit_prepare(self) -> Generator[None, Any, Any]:
        self.result = yield
        return self.result

    @hookimpl(wrapper=True, trylast=True)
    def shardkit_control(self) -> Generator[None, Any, Any]:
        self.result = yield
        return self.result


@cache
def seen() -> Seen:
    """Return what saw the last result."""
    return Seen()


def wraps_others(plugin: Any) -> bool:
    """Return whether a loaded plugin is a wrapper and no backend."""
    return (manager().get_name(plugin) or "").startswith("wrapper ")


def wrapper_of(plugin: Any) -> Claim:
    """Return the claim of a wrapper that is loaded."""
    return _loaded()[manager().get_name(plugin) or ""]


@cache
def _loaded() -> dict[str, Claim]:
    """Return the wrappers by their names in the manager."""
    return {}
