"""Whether a plugin's functions are implementations of the hooks that exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

import pluggy

from shardkit._claim import Claim

WRAPPED = ("shardkit_prepare", "shardkit_control")
"""The hooks that another plugin may wrap: those that build an engine."""

REQUIRED = ("shardkit_describe", "shardkit_prepare")
"""The hooks without which there is no backend."""

_NEAR = 0.85
"""How alike a name is to a hook's for a slip of the pen, of 1: ``shardkit_prepair`` is, ``prepare_model`` isn't."""


class Implementation(NamedTuple):
    """A function of a plugin that is marked with ``hookimpl``."""

    hook: str
    function: Callable[..., Any]
    wraps: bool
    optional: bool
    """Whether the plugin does without, where there is no such hook."""


def hooks_of(plugin: Any, manager: pluggy.PluginManager) -> list[Implementation]:
    """Return the implementations in a plugin, registered or not."""
    found = []
    for name in dir(plugin):
        options: dict[str, Any] | None = manager.parse_hookimpl_opts(plugin, name)  # type: ignore[assignment]
        if options is not None:
            hook = options.get("specname") or name
            wraps = bool(options.get("wrapper") or options.get("hookwrapper"))
            found.append(Implementation(hook, getattr(plugin, name), wraps, bool(options.get("optionalhook"))))
    return found


def arguments_of_hooks(manager: pluggy.PluginManager) -> dict[str, tuple[str, ...]]:
    """Return the hooks that exist, each with its arguments."""
    known = vars(manager.hook)
    return {name: caller.spec.argnames for name, caller in known.items() if caller.has_spec()}


def check_plugin(claim: Claim, plugin: Any, manager: pluggy.PluginManager) -> None:
    """Raise unless a plugin's hooks are those that exist, with arguments that they have, and none is forgotten.

    Raises:
        PluginError: says what is wrong with which, and what would be right.
    """
    known = arguments_of_hooks(manager)
    marked = hooks_of(plugin, manager)
    wraps = claim.kind == "wrapper"
    for hook, function, wrapping, optional in marked:
        if hook not in known:
            if optional:
                continue
            raise claim.error(
                f"implements hooks that do not exist: {hook}{_hint(hook, known)}; hooks are {', '.join(known)}",
                "spell it so, or mark it optionalhook=True if a newer shardkit has it",
            )
        _check_arguments(claim, hook, function, known[hook])
        if wrapping and not inspect.isgeneratorfunction(function):
            raise claim.error(
                f"marks {hook} as a wrapper, and it doesn't yield", "write engine = yield, then return engine"
            )
        if wraps and not wrapping:
            raise claim.error(
                f"implements {hook} itself, which every backend would be asked in place of its own",
                "mark it with hookimpl(wrapper=True), or make it a backend by giving it a name",
            )
        if wraps and hook not in WRAPPED:
            raise claim.error(f"wraps {hook}", f"what can be wrapped is {' and '.join(WRAPPED)}")
    for name in _unmarked(plugin, manager):
        near = get_close_matches(name.lower(), known, n=1, cutoff=_NEAR)
        if near:
            slip = "" if near[0] == name else f" under the name {name!r}"
            raise claim.error(
                f"has {near[0]}{slip} without the mark of a hook, so that it would never be called",
                f"write @shardkit.hookimpl above it{f' and name it {near[0]}' if slip else ''}",
            )
    own = {found.hook for found in marked if not found.wraps}
    missing = [hook for hook in REQUIRED if hook not in own]
    if missing and not wraps:
        raise claim.error(
            f"does not implement {' and '.join(missing)}, marked with shardkit.hookimpl",
            f"a backend has {' and '.join(REQUIRED)}, the entry point names the module or object that has them",
        )
    if wraps and not marked:
        raise claim.error("wraps nothing: it has no hook marked with hookimpl(wrapper=True)")


def _unmarked(plugin: Any, manager: pluggy.PluginManager) -> Iterator[str]:
    for name in dir(plugin):
        value = inspect.getattr_static(plugin, name, None)
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(value) and not name.startswith("_") and manager.parse_hookimpl_opts(plugin, name) is None:
            yield name


def _check_arguments(claim: Claim, hook: str, function: Any, known: tuple[str, ...]) -> None:
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        # With a default it may be an argument of another version of the hook.
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    for name in names:
        if name in known:
            continue
        if name == "self" and inspect.isclass(claim.plugin if claim.entry_point is None else claim.load()):
            raise claim.error("is a class, whose hooks have nobody to be called on", "name an object of it")
        has = f"the hook has {', '.join(known)}" if known else "the hook has none"
        raise claim.error(
            f"misdeclares a hook: its {hook} asks for an argument {name!r}{_hint(name, known)}",
            f"{has}, of which an implementation names those that it needs",
        )


def _hint(name: str, known: Any) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
