"""How backends are found, and how broken plugins are told of."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardkit
from shardkit import Backend, Engine, Update, Variant, hookimpl
from shardkit._registry import _manager, _registered
from shardkit.errors import BackendNotFoundError, MissingLibraryError, PluginError, StrategyError
from tests._bad_plugins import install


class PlainEngine(Engine):
    """Trains on one process with torch alone."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self._step = model, optimizer, optimizer.step

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        loss.backward(gradient)

    def step(self) -> Update:
        self._step()
        for value in self.model.parameters():
            value.grad = None
        return Update(True)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Plain:
    """A backend as somebody else would write it."""

    declared: ClassVar[dict[str, Any]] = {}

    @hookimpl
    def shardkit_describe(self) -> Backend:
        settings = {
            "name": "plain",
            "summary": "one process",
            "variants": (Variant(strategy="plain", summary=""),),
            **self.declared,
        }
        return Backend(**settings)

    @hookimpl
    def shardkit_prepare(self, model: Any, optimizer: Any, strategy: Any, options: Any) -> Engine:
        return PlainEngine(model, optimizer)


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    before = set(_manager().get_plugins())
    yield
    for plugin in set(_manager().get_plugins()) - before:
        _manager().unregister(plugin)
    _registered().clear()


def train(strategy: str) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session:
        session.backward(session.model(torch.ones(2)).sum())
        assert session.step()
    return model


def test_a_registered_backend_trains_and_is_listed() -> None:
    shardkit.register(Plain(), "plain")
    assert shardkit.backends()["plain"].summary == "one process"
    assert torch.equal(train("plain").weight, torch.full((1, 2), 0.9))


def test_an_unknown_backend_is_named_with_the_nearest_and_the_installed() -> None:
    with pytest.raises(BackendNotFoundError, match=r"'ddb': did you mean 'ddp'\? installed are ddp, deepspeed"):
        train("ddb")


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PluginError, match=r"'ddp' is taken by distribution shardkit"):
        shardkit.register(Plain(), "ddp")
    shardkit.register(Plain(), "plain")
    with pytest.raises(PluginError, match="'plain' is taken by registered object"):
        shardkit.register(Plain(), "plain")


def test_a_wrapper_sees_every_prepare_of_every_backend() -> None:
    seen: list[str] = []

    class Timing:
        @hookimpl(wrapper=True)
        def shardkit_prepare(self, strategy: Any) -> Any:
            seen.append(f"before {strategy.backend}")
            engine = yield
            seen.append(f"after {type(engine).__name__}")
            return engine

    shardkit.register(Timing())
    shardkit.register(Plain(), "plain")
    train("plain")
    train("ddp")
    assert seen == ["before plain", "after PlainEngine", "before ddp", "after DDPEngine"]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (SimpleNamespace(), "an object that can be hashed"),
        (object(), "does not implement shardkit_describe and shardkit_prepare"),
        (type("Half", (), {"shardkit_describe": Plain.shardkit_describe})(), "does not implement shardkit_prepare"),
    ],
)
def test_a_plugin_without_the_hooks_is_refused(plugin: object, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        shardkit.register(plugin, "broken")


def test_a_misspelled_hook_is_named() -> None:
    class Misspelled(Plain):
        @hookimpl
        def shardkit_prepair(self) -> None: ...

    with pytest.raises(PluginError, match="hooks that do not exist: shardkit_prepair"):
        shardkit.register(Misspelled(), "broken")


def test_a_hook_with_an_argument_that_does_not_exist_is_refused() -> None:
    class Asking(Plain):
        @hookimpl
        def shardkit_prepare(self, modle: Any) -> Any: ...  # type: ignore[override]

    with pytest.raises(PluginError, match="misdeclares a hook"):
        shardkit.register(Asking(), "broken")


def test_a_description_of_the_wrong_type_or_name_is_refused() -> None:
    class Wrong(Plain):
        @hookimpl
        def shardkit_describe(self) -> Any:
            return {"name": "wrong"}

    shardkit.register(Wrong(), "wrong")
    with pytest.raises(PluginError, match=r"returns .* from its shardkit_describe, which returns a Backend"):
        train("wrong")
    shardkit.register(Plain(), "other")
    with pytest.raises(PluginError, match="describes a backend named 'plain'"):
        train("other")
    assert "wrong" not in shardkit.backends()
    assert "ddp" in shardkit.backends()


def test_a_prepare_that_returns_no_engine_is_refused() -> None:
    class Wrong(Plain):
        @hookimpl
        def shardkit_prepare(self, model: Any) -> Any:  # type: ignore[override]
            return "engine"

    shardkit.register(Wrong(), "plain")
    with pytest.raises(PluginError, match=r"shardkit_prepare of plugin 'plain' .* returns 'engine'"):
        train("plain")


def test_an_error_of_the_plugin_goes_through_with_a_note_that_names_it() -> None:
    class Failing(Plain):
        @hookimpl
        def shardkit_prepare(self, model: Any) -> Any:  # type: ignore[override]
            raise ZeroDivisionError("by zero")

    shardkit.register(Failing(), "plain")
    with pytest.raises(ZeroDivisionError) as caught:
        train("plain")
    assert any("backend 'plain'" in note for note in caught.value.__notes__)
    train("ddp")


def test_a_plugin_that_exits_the_interpreter_is_an_error_of_that_plugin() -> None:
    class Exiting(Plain):
        @hookimpl
        def shardkit_prepare(self, model: Any) -> Any:  # type: ignore[override]
            sys.exit(1)

    shardkit.register(Exiting(), "plain")
    with pytest.raises(PluginError, match="exits the interpreter with 1"):
        train("plain")


def test_a_library_that_is_missing_or_too_old_is_told_with_the_command() -> None:
    class Absent(Plain):
        declared: ClassVar = {"library": "no_such_library", "requires": "no-such>=1", "install": "pip install no-such"}

    class Old(Plain):
        declared: ClassVar = {
            "name": "old",
            "variants": (Variant(strategy="old", summary=""),),
            "library": "pluggy",
            "requires": "pluggy>=999",
            "install": "pip install pluggy",
        }

    shardkit.register(Absent(), "plain")
    with pytest.raises(MissingLibraryError, match=r"needs no_such_library, .* pip install no-such"):
        train("plain")
    shardkit.register(Old(), "old")
    with pytest.raises(MissingLibraryError, match=r"needs pluggy>=999, not \d"):
        train("old")


@pytest.mark.parametrize(
    ("requires", "installed", "fits"),
    [
        ("pluggy>=1.2", "1.2", True),
        ("pluggy>=1.2", "1.1.9", False),
        ("pluggy>=1.2,<2", "2.0", False),
        ("pluggy>=1.2,<2", "1.9+cpu", True),
        ("pluggy>=1.2", "1.2rc1", True),
        ("pluggy!=1.3", "1.3", False),
        ("pluggy", "0.1", True),
    ],
)
def test_a_library_is_held_to_all_that_the_plugin_requires_of_it(
    requires: str, installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit._registry import require_library

    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    backend = Backend(name="mine", summary="", variants=(), library="pluggy", requires=requires)
    if fits:
        require_library(backend)
    else:
        with pytest.raises(MissingLibraryError, match=f"needs {re.escape(requires)}, not {re.escape(installed)}"):
            require_library(backend)


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(StrategyError, match=r"no option 'bucket_cap': did you mean 'bucket_cap_mb'\?"):
        train("ddp:bucket_cap=3")
    with pytest.raises(StrategyError, match="option 'bucket_cap_mb' of backend 'ddp' is a number or None, not 'big'"):
        train("ddp:bucket_cap_mb=big")
    with pytest.raises(StrategyError, match="above 0 MiB"):
        train("ddp:bucket_cap_mb=-1")


def ask(folder: Path, name: str) -> str:
    """Return what a fresh interpreter says when it is asked for a backend and for all."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "import shardkit\nfrom shardkit._registry import describe\n"
        "print('listed', *shardkit.backends())\n"
        f"try: print('described', describe({name!r}).name)\n"
        "except shardkit.errors.ShardkitError as error: print(type(error).__name__, error)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


WHOLE = """
    from shardkit import Backend, Variant, hookimpl
    @hookimpl
    def shardkit_describe(): return Backend(name="mine", summary="", variants=(Variant(strategy="mine", summary=""),))
    @hookimpl
    def shardkit_prepare(model, optimizer): return None
"""


def test_an_installed_distribution_brings_a_backend(tmp_path: Path) -> None:
    install(tmp_path, "mine", WHOLE)
    said = ask(tmp_path, "mine")
    assert "described mine" in said
    assert "mine" in said.splitlines()[0]
