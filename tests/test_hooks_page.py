"""docs/hooks.md names every hook and argument, and the policy for changing them is what the code does."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

import shardkit
from shardkit import Backend, Variant, hookimpl, hookspecs
from shardkit._implementations import WRAPPED
from shardkit._registry import _manager, _registered

PAGE = (Path(__file__).parent.parent / "docs" / "hooks.md").read_text()

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("shardkit_")}

FACTS = ["Called", "On", "May import", "Returns", "Raises", "Since"]


def heading(name: str, hook: Callable[..., Any]) -> str:
    signature = inspect.signature(hook)
    return f"## `{name}({', '.join(signature.parameters)}) -> {signature.return_annotation}`"


def section(head: str) -> str:
    """Return what stands under a heading."""
    assert PAGE.count(f"{head}\n") == 1, f"docs/hooks.md has no section, or several, with the heading {head}"
    return PAGE.partition(f"{head}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_section_with_its_signature_and_when_where_and_what(name: str) -> None:
    rows = re.findall(r"^\| ([A-Z][\w ]+) \| (.+) \|$", section(heading(name, HOOKS[name])), re.MULTILINE)
    assert [row for row, _ in rows if row != "Argument"] == FACTS
    assert all(len(text) > 2 for _, text in rows)


@pytest.mark.parametrize("name", HOOKS)
def test_every_argument_has_a_row_in_the_order_of_the_signature(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| .{8,} \|$", section(heading(name, HOOKS[name])), re.MULTILINE)
    assert rows == list(inspect.signature(HOOKS[name]).parameters)


def test_the_page_names_no_hook_that_does_not_exist() -> None:
    named = set(re.findall(r"\bshardkit_[a-z]+\b", PAGE)) - {"shardkit_logged"}
    assert named == set(HOOKS)


def test_the_page_says_which_hooks_can_be_wrapped() -> None:
    told = section("## Wrapping").partition(" of all backends")[0]
    assert tuple(re.findall(r"`(shardkit_\w+)`", told)) == WRAPPED


def test_the_public_modules_are_those_that_the_page_names() -> None:
    told = re.search(r"the modules (.+?), and the entry-point groups", PAGE)
    assert told is not None
    for name in re.findall(r"`(?:shardkit\.)?(\w+)`", told[1]):
        assert inspect.getdoc(__import__(f"shardkit.{name}", fromlist=["_"]))


# The policy.


class Later:
    """A plugin that is written for a later shardkit too."""

    @hookimpl
    def shardkit_describe(self, colour: str = "blue") -> Backend:
        return Backend(name="later", summary=colour, variants=(Variant(strategy="later", summary=""),))

    @hookimpl
    def shardkit_prepare(self, model: Any) -> None: ...

    @hookimpl(optionalhook=True)
    def shardkit_rebuild(self) -> None: ...


@pytest.fixture
def later() -> Iterator[None]:
    plugin = Later()
    shardkit.register(plugin, "later")
    yield
    _manager().unregister(plugin)
    _registered().clear()


@pytest.mark.usefixtures("later")
def test_an_argument_with_a_default_and_an_optional_hook_do_not_hinder_an_older_shardkit() -> None:
    assert shardkit.backends()["later"].summary == "blue"


def test_where_the_hook_has_the_argument_it_takes_the_place_of_the_default() -> None:
    class Specs:
        @hookspecs.hookspec(firstresult=True)
        def shardkit_describe(self, colour: str) -> Any: ...

    manager = pluggy.PluginManager("shardkit")
    manager.add_hookspecs(Specs)
    manager.register(Later())
    assert manager.hook.shardkit_describe(colour="green").summary == "green"


def test_what_is_deprecated_warns_whoever_implements_it_and_works() -> None:
    class Specs:
        @hookspecs.hookspec(firstresult=True, warn_on_impl=DeprecationWarning("name it shardkit_declare"))
        def shardkit_describe(self, colour: str) -> Any: ...

    manager = pluggy.PluginManager("shardkit")
    manager.add_hookspecs(Specs)
    with pytest.warns(DeprecationWarning, match="name it shardkit_declare"):
        manager.register(Later())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.hook.shardkit_describe(colour="green").summary == "green"
