"""A bad plugin gets an error that names it, its distribution and what to do; all other backends still work."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import shardkit
from shardkit import hookimpl
from shardkit._registry import _manager
from shardkit.cli import main
from shardkit.errors import PluginError
from shardkit.testing import run
from tests._bad_plugins import FAILING, HEAD, OTHER_HOOKS, UNDESCRIBED, UNPREPARED, WHOLE, Bad, install, install_all

LISTED = list(shardkit.backends())
"""Those that are there without the bad ones."""


def check(name: str, bad: Bad, message: str, kind: str = "PluginError") -> None:
    """Raise unless an error says whose plugin it is, what is wrong and what to do."""
    assert kind == "PluginError", message
    assert re.search(rf"(plugin|backend) '{name}' \(distribution their-{name} 1.2\)", message)
    assert re.search(bad.says, message)
    assert re.search(bad.advice.replace("NAME", name), message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a distribution of each bad plugin, and a name that two claim."""
    made = tmp_path_factory.mktemp("plugins")
    install_all(made, UNDESCRIBED | UNPREPARED | FAILING | OTHER_HOOKS)
    for distribution in ("one-of-two", "other-of-two"):
        install(made, "twice", HEAD + WHOLE.replace("NAME", "'twice'"), distribution=distribution)
    return made


ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import shardkit
from shardkit._registry import claims, describe
found = {}
for name in claims():
    try:
        found[name] = ["described", describe(name).name]
    except shardkit.errors.ShardkitError as error:
        found[name] = [type(error).__name__, str(error)]
listed = list(shardkit.backends())
print(json.dumps({"found": found, "listed": listed, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def described(folder: Path) -> dict[str, Any]:
    """Return what a fresh interpreter says when it describes each."""
    done = subprocess.run([sys.executable, "-c", ASK, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_a_plugin_that_cannot_be_described_is_named_with_what_to_do(name: str, described: dict[str, Any]) -> None:
    kind, message = described["found"][name]
    check(name, UNDESCRIBED[name], message, kind)


def test_a_name_that_two_distributions_claim_is_nobodys(described: dict[str, Any]) -> None:
    kind, message = described["found"]["twice"]
    assert kind == "PluginError"
    assert "claimed by distribution one-of-two 1.2 and distribution other-of-two 1.2: uninstall all but one" in message


def test_all_others_are_described_without_torch(described: dict[str, Any]) -> None:
    assert described["listed"] == sorted([*LISTED, *UNPREPARED, *FAILING, *OTHER_HOOKS])
    assert not described["torch"]


class W(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: float) -> torch.Tensor:
        return (self.w * x).sum()


def train(strategy: str, x: float = 1.0) -> float:
    model = W()
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session:
        session.backward(session.model(x))
        session.step()
    return model.w.item()


def _prepare_all(folder: str, names: list[str]) -> dict[str, Any]:
    import os

    sys.path.insert(0, folder)
    found: dict[str, Any] = {}
    for name in names:
        try:
            train(name)
        except Exception as error:
            found[name] = (type(error).__name__, str(error), getattr(error, "__notes__", []))
    found["ddp"] = train("ddp", int(os.environ["RANK"]) + 1)
    return found


@pytest.fixture(scope="module")
def prepared(folder: Path) -> list[dict[str, Any]]:
    """Return what each of two ranks says when it prepares under each."""
    return run(_prepare_all, str(folder), [*UNDESCRIBED, *UNPREPARED, *FAILING], processes=2, timeout=120)


@pytest.mark.parametrize("name", [name for name in UNDESCRIBED if name != "auto"])
def test_prepare_refuses_it_with_the_same_error_on_every_rank(name: str, prepared: list[dict[str, Any]]) -> None:
    for found in prepared:
        kind, message, _ = found[name]
        check(name, UNDESCRIBED[name], message, kind)
    assert prepared[0][name] == prepared[1][name]


@pytest.mark.parametrize("name", UNPREPARED)
def test_a_plugin_that_builds_no_engine_is_named_on_every_rank(name: str, prepared: list[dict[str, Any]]) -> None:
    for found in prepared:
        kind, message, _ = found[name]
        check(name, UNPREPARED[name], message, kind)
    assert prepared[0][name] == prepared[1][name]


def test_an_error_of_the_plugins_own_goes_through_and_a_note_says_whose(prepared: list[dict[str, Any]]) -> None:
    for found in prepared:
        kind, message, notes = found["fails"]
        assert (kind, message) == ("ZeroDivisionError", "division by zero")
        assert notes == ["raised by backend 'fails' (distribution their-fails 1.2) in its shardkit_prepare"]


def test_what_it_raises_on_one_rank_only_is_told_with_its_name_on_every_rank(prepared: list[dict[str, Any]]) -> None:
    whose = "raised by backend 'fails-on-one' (distribution their-fails-on-one 1.2) in its shardkit_prepare"
    for found in prepared:
        kind, message, _ = found["fails-on-one"]
        assert (kind, message) == ("ShardkitError", f"rank 1: ZeroDivisionError: division by zero ({whose})")


def test_another_backend_trains_beside_them(prepared: list[dict[str, Any]]) -> None:
    # The gradient is the mean of 1 and 2.
    assert [found["ddp"] for found in prepared] == [pytest.approx(0.85)] * 2


@pytest.fixture
def installed(folder: Path) -> Iterator[Path]:
    """Put the folder on the path of this process."""
    before = set(_manager().get_plugins())
    modules = set(sys.modules)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for plugin in set(_manager().get_plugins()) - before:
        _manager().unregister(plugin)
    for name in set(sys.modules) - modules:
        if name.startswith("their_"):
            del sys.modules[name]


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert isinstance(result.exception, SystemExit | None)
    assert result.exit_code == code, result.output
    return result.stdout


def test_commands_show_the_broken_ones_with_the_reason_and_work_for_others(installed: Path) -> None:
    listed = {backend["name"]: backend for backend in json.loads(invoke("backends", "--json"))}
    assert listed["ddp"]["installed"]
    for name, bad in UNDESCRIBED.items():
        assert not listed[name]["installed"]
        check(name, bad, listed[name]["problem"])
    assert "misspelled: plugin 'misspelled' (distribution their-misspelled 1.2)" in invoke("backends")
    assert "bucket_cap_mb" in invoke("backends", "ddp")

    found = {finding["check"]: finding for finding in json.loads(invoke("doctor", "--json", code=1))}
    assert found["backend ddp"]["level"] == "fine"
    assert found["backend misspelled"]["level"] == "problem"
    assert re.search(UNDESCRIBED["newer"].advice, found["backend newer"]["advice"])
    for name in ("diagnose-text", "diagnose-exits"):
        assert re.search(OTHER_HOOKS[name].says, found[f"backend {name}"]["message"])

    asked = "ddp,footprint-text,footprint-fails,footprint-loose"
    told = json.loads(invoke("plan", "mlp", "--strategies", asked, "--processes", "2", "--json"))
    rows = {row["strategy"]: row for row in told["rows"]}
    assert rows["ddp"]["status"] == "fits"
    for name in ("footprint-text", "footprint-fails", "footprint-loose"):
        assert rows[name]["status"] == "refused"
        check(name, OTHER_HOOKS[name], rows[name]["note"])


def test_a_distribution_that_is_half_gone_is_named_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "half", "1 / 0")
    (tmp_path / "their_half-1.2.dist-info" / "METADATA").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    listed = {backend["name"]: backend for backend in json.loads(invoke("backends", "--json"))}
    assert listed["ddp"]["installed"]
    assert "ZeroDivisionError" in listed["half"]["problem"]
    assert str(tmp_path / "their_half-1.2.dist-info") in listed["half"]["problem"]


def test_auto_takes_one_of_the_others(installed: Path) -> None:
    chosen = shardkit.Strategy("auto", options={"memory": "1GiB"})
    model = W()
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen) as session:
        assert session.strategy.backend in LISTED


def test_a_benchmark_has_a_row_for_each_that_can_be_asked_for(installed: Path) -> None:
    from shardkit.bench._arms import arms

    found = {arm.row.strategy: arm.row for arm in arms([], [], None, 1, "cpu")}
    assert found["ddp"].status == "measured"
    for name in set(UNDESCRIBED) - {"Capital", "auto"}:
        assert found[name].status == "failed"
        check(name, UNDESCRIBED[name], found[name].note)


def test_compare_has_a_row_for_the_broken_one_and_trains_the_others(installed: Path) -> None:
    options = ("--workload", "mlp", "--steps", "1", "--processes", "1", "--device", "cpu", "--json")
    told = json.loads(invoke("compare", "--strategies", "ddp,misspelled", *options, code=2))
    rows = {row["strategy"]: row for row in told["strategies"]}
    assert rows["ddp"]["status"] == "agrees"
    check("misspelled", UNDESCRIBED["misspelled"], rows["misspelled"]["note"])


def test_a_control_of_the_wrong_type_is_named(installed: Path) -> None:
    from shardkit import _registry

    model = W()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PluginError) as caught:
        _registry.control("control-text", model, optimizer, shardkit.Strategy("control-text"), None)
    check("control-text", OTHER_HOOKS["control-text"], str(caught.value))


class Reader:
    """A backend that reads checkpoints, after the bad ones."""

    @hookimpl
    def shardkit_describe(self) -> Any: ...

    @hookimpl
    def shardkit_prepare(self) -> Any: ...

    @hookimpl
    def shardkit_import(self, source: shardkit.Source) -> shardkit.Imported | None:
        return shardkit.Imported(kind="mine", weights={}) if source.path.name == "mine" else None


@pytest.mark.parametrize("name", ["import-text", "import-fails"])
def test_a_reader_that_goes_wrong_is_named_unless_another_reads_the_checkpoint(name: str, tmp_path: Path) -> None:
    from shardkit import Source, _registry

    install_all(tmp_path, {name: OTHER_HOOKS[name]})
    before = set(_manager().get_plugins())
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises((PluginError, ZeroDivisionError), match=OTHER_HOOKS[name].says) as caught:
            _registry.read_other(Source(tmp_path / "weights"))
        told = " ".join([str(caught.value), *caught.value.__notes__])
        assert f"{name!r} (distribution their-{name} 1.2)" in told
        assert str(tmp_path / "weights") in told
        shardkit.register(Reader(), "zz-reader")
        found = _registry.read_other(Source(tmp_path / "mine"))
        assert found is not None
        assert found.kind == "mine"
    finally:
        sys.path.remove(str(tmp_path))
        _registry._registered().pop("zz-reader", None)
        for plugin in set(_manager().get_plugins()) - before:
            _manager().unregister(plugin)


# Wrappers, which concern every backend.


class Wrapper:
    """A wrapper as somebody would write it, and nothing wrong with it."""

    @hookimpl(wrapper=True)
    def shardkit_prepare(self, model: Any) -> Any:
        return (yield)


def wrapper(before: str = "pass", after: str = "return engine", mark: str = "hookimpl(wrapper=True)") -> Any:
    """Return a wrapper that does this before and after the engine is built."""
    scope: dict[str, Any] = {"hookimpl": hookimpl}
    hook = f"  @{mark}\n  def shardkit_prepare(self, model):\n    {before}\n    engine = yield\n    {after}\n"
    exec(f"class Broken:\n{hook}  def __repr__(self): return 'broken'\n", scope)
    return scope["Broken"]()


@pytest.fixture
def clean() -> Iterator[None]:
    before = set(_manager().get_plugins())
    yield
    for plugin in set(_manager().get_plugins()) - before:
        _manager().unregister(plugin)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (wrapper(before="return"), "doesn't yield in its shardkit_prepare: a wrapper yields once"),
        (wrapper(after="yield"), "yields more than once in its shardkit_prepare"),
        (wrapper(after="return None"), "gives None in the place of what shardkit_prepare of plugin 'ddp'"),
        (
            wrapper(after="return 'engine'"),
            "around shardkit_prepare of plugin 'ddp' .*, returns 'engine', which is no Eng",
        ),
        (wrapper(after="raise SystemExit(7)"), "exits the interpreter with 7 in its shardkit_prepare"),
        (wrapper(before="raise SystemExit(7)"), "exits the interpreter with 7 in its shardkit_prepare"),
    ],
    ids=["never yields", "yields twice", "returns None", "returns a string", "exits after", "exits before"],
)
def test_a_wrapper_that_misbehaves_is_named_and_not_the_backend(plugin: Any, says: str) -> None:
    shardkit.register(plugin)
    with pytest.raises(PluginError, match=rf"^wrapper 'broken' \(registered in this process\).*{says}"):
        train("ddp")
    _manager().unregister(plugin)
    assert train("ddp") == pytest.approx(0.9)


@pytest.mark.usefixtures("clean")
def test_of_several_wrappers_each_that_may_have_done_it_is_named() -> None:
    shardkit.register(wrapper(after="return None"))
    shardkit.register(Wrapper())
    with pytest.raises(PluginError, match=r"wrapper 'broken' .* or wrapper '<.*Wrapper object.* gives None"):
        train("ddp")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_wrapper_raises_goes_through_with_a_note_that_names_it(when: str) -> None:
    shardkit.register(wrapper(**{when: "1 / 0"}))
    shardkit.register(Wrapper())
    with pytest.raises(ZeroDivisionError) as caught:
        train("ddp")
    assert caught.value.__notes__ == ["raised by wrapper 'broken' (registered in this process) in its shardkit_prepare"]


@pytest.mark.usefixtures("clean")
def test_what_a_backend_raises_through_a_wrapper_is_the_backends(installed: Path) -> None:
    shardkit.register(Wrapper())
    with pytest.raises(ZeroDivisionError) as caught:
        train("fails")
    assert caught.value.__notes__ == [
        "raised by backend 'fails' (distribution their-fails 1.2) in its shardkit_prepare"
    ]


@pytest.mark.usefixtures("clean")
def test_nothing_of_an_engine_is_kept_once_its_session_is_gone() -> None:
    shardkit.register(Wrapper())
    model = W()
    held = weakref.ref(model)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "ddp") as session:
        session.backward(session.model(1.0))
        session.step()
    del model, session
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (wrapper(mark="hookimpl"), "implements shardkit_prepare itself, which every backend would be asked"),
        (object(), "wraps nothing"),
        (
            type("P", (), {"shardkit_describe": hookimpl(wrapper=True)(lambda self: (yield))})(),
            "wraps shardkit_describe; what can be wrapped is shardkit_prepare and shardkit_control",
        ),
        (
            type("P", (), {"shardkit_prepare": hookimpl(wrapper=True)(lambda self: None)})(),
            "marks shardkit_prepare as a wrapper, and it doesn't yield; write engine = yield",
        ),
    ],
    ids=["no wrapper", "nothing", "another hook", "no generator"],
)
def test_what_is_no_wrapper_is_refused_when_it_is_registered(plugin: Any, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        shardkit.register(plugin)
    assert train("ddp") == pytest.approx(0.9)


def test_an_installed_wrapper_that_is_broken_is_named_before_anything_is_built(tmp_path: Path) -> None:
    install(tmp_path, "timing", "1 / 0", group="shardkit.wrappers")
    sys.path.insert(0, str(tmp_path))
    try:
        says = r"wrapper 'timing' \(distribution their-timing 1.2\) fails to import: ZeroDivisionError.*pip uninstall"
        with pytest.raises(PluginError, match=says):
            train("ddp")
        told = "no backend can be used: wrapper 'timing' (distribution their-timing 1.2) fails to import"
        assert told in " ".join(invoke("backends").split())
        found = {finding["check"]: finding for finding in json.loads(invoke("doctor", "--json", code=1))}
        assert found["wrapper timing"]["level"] == "problem"
        assert "uninstall it (pip uninstall their-timing)" in found["wrapper timing"]["advice"]
    finally:
        sys.path.remove(str(tmp_path))
    assert train("ddp") == pytest.approx(0.9)
