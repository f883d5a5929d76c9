"""Calls of plugins' hooks, which say whose fault it is when one goes wrong."""

from __future__ import annotations

import inspect
from typing import Any

from shardkit._claim import Claim
from shardkit._implementations import hooks_of
from shardkit._plugins import load, manager, seen, wrapper_of, wraps_others
from shardkit.errors import MissingLibraryError, PluginError, ShardkitError


def call(claim: Claim, hook: str, **arguments: Any) -> Any:
    """Return what a backend's plugin gives for a hook, through all wrappers; None where it doesn't implement it.

    An error of shardkit's own tree goes through unchanged, as does one of a plugin, which gets a note that says whose.

    Raises:
        PluginError: the plugin or a wrapper exits the interpreter, or a wrapper misbehaves.
    """
    return traced(claim, hook, **arguments)[0]


def traced(claim: Claim, hook: str, **arguments: Any) -> tuple[Any, str]:
    """Do as :func:`call`, and return who gave the result too, as the start of an error about it."""
    plugin = load(claim)
    held = manager()
    others = [
        other
        for other in held.get_plugins()
        if other is not plugin and (held.get_name(other) or "").startswith("backend ")
    ]
    within = seen()
    try:
        found = held.subset_hook_caller(hook, remove_plugins=others)(**arguments)
    except (ShardkitError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise _culprit(claim, error).error(f"exits the interpreter with {error.code!r} in its {hook}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith("wrap_controller at"):
            how = "doesn't yield" if "did not yield" in str(error) else "yields more than once"
            raise PluginError(
                f"{_wrapping(claim, hook)} {how} in its {hook}: a wrapper yields once, and returns what it got"
            ) from error
        culprit = _culprit(claim, error)
        kind = "backend" if culprit is claim else "wrapper"
        error.add_note(f"raised by {kind} {culprit.name!r} ({culprit.origin}) in its {hook}")
        raise
    finally:
        # Not to be kept: it has the model.
        own, within.result = within.result, None
    if own is not None and found is None:
        raise PluginError(
            f"{_wrapping(claim, hook)} gives None in the place of what {hook} of {claim.title} returned: "
            "a wrapper ends with 'return' and what its yield gave"
        )
    wrapped = own is not None and found is not own
    return (
        found,
        f"{_wrapping(claim, hook)}, around {hook} of {claim.title}," if wrapped else f"{hook} of {claim.title}",
    )


def guarded(claim: Claim, hook: str, *, refuses: bool = False, **arguments: Any) -> Any:
    """Do as :func:`call`, of a hook that has no reason to raise: what it does is a PluginError.

    Where it ``refuses``, other errors of shardkit's tree go through.

    Raises:
        PluginError: whatever went wrong.
    """
    from shardkit import __version__

    try:
        return call(claim, hook, **arguments)
    except MissingLibraryError:
        raise
    except PluginError as error:
        if str(error).startswith(("plugin ", "wrapper ")):
            raise
        # Of what it declares, which doesn't know by whom.
        raise claim.error(f"misdeclares itself in its {hook}: {error}") from error
    except Exception as error:
        if refuses and isinstance(error, ShardkitError):
            raise
        told = f"raises in its {hook}: {type(error).__name__}: {error}"
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            told += f", as if written for another version than this shardkit {__version__}"
        raise claim.error(told) from error


def _culprit(claim: Claim, error: BaseException) -> Claim:
    """Return the plugin in whose hook an error was raised: the innermost frame that is a hook's."""
    claims = dict.fromkeys(_codes(claim.load()), claim)
    for plugin in manager().get_plugins():
        if wraps_others(plugin):
            claims |= dict.fromkeys(_codes(plugin), wrapper_of(plugin))
    found, step = claim, error.__traceback__
    while step is not None:
        found = claims.get(step.tb_frame.f_code, found)
        step = step.tb_next
    return found


def _codes(plugin: Any) -> list[Any]:
    functions = (inspect.unwrap(found.function) for found in hooks_of(plugin, manager()))
    return [function.__code__ for function in functions if hasattr(function, "__code__")]


def _wrapping(claim: Claim, hook: str) -> str:
    """Return the plugins that wrap a hook: one of them did it, most often the only one."""
    found = []
    for implementation in getattr(manager().hook, hook).get_hookimpls():
        if implementation.wrapper or implementation.hookwrapper:
            if wraps_others(implementation.plugin):
                found.append(wrapper_of(implementation.plugin).title)
            elif manager().get_name(implementation.plugin) == f"backend {claim.name}":
                found.append(claim.title)
    return " or ".join(found)
