"""The shape of the code: who may import whom, and what is loaded when."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").exists())
CORE = sorted((ROOT / "shardkit").rglob("*.py"))
# Not core: its flags are named after libraries. It knows them as a user does, by strategies, and imports no plugin.
TRAINER = ROOT / "shardkit" / "transformers"
LIBRARIES = {"deepspeed", "fairscale"}


def imports(path: Path) -> list[tuple[str, str]]:
    """Return each import of a file as a pair of module and name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize(
    "path", [path for path in CORE if TRAINER not in path.parents], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_core_names_no_backend(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    names = {plugin.name.removeprefix("shardkit_") for plugin in PLUGINS} | LIBRARIES
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            words = set(node.value.lower().replace(":", " ").replace(".", " ").split())
            assert not words & names, f"line {node.lineno} names a backend: {node.value!r}"
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            assert word.lower() not in names, f"line {node.lineno} names a backend: {word}"


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_no_plugin_and_no_library_of_a_backend(path: Path) -> None:
    roots = {module.partition(".")[0] for module, _ in imports(path)}
    assert not roots & (LIBRARIES | {plugin.name for plugin in PLUGINS})


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_imports_public_names_of_the_core_and_nothing_of_another(plugin: Path) -> None:
    modules = "averaging control errors gradients lockstep nested optimizers owners parameters replicated"
    public = {f"shardkit.{name}" for name in modules.split()}
    others = {other.name for other in PLUGINS} - {plugin.name}
    for path in plugin.rglob("*.py"):
        for module, name in imports(path):
            root = module.partition(".")[0]
            assert root not in others, f"{path.name} imports {module}"
            if root == "shardkit":
                names = {name} if module == "shardkit" else set()
                assert module == "shardkit" or module in public, f"{path.name} imports the private {module}"
                assert names <= set(shardkit.__all__), f"{path.name} imports the private shardkit.{name}"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_every_plugin_has_its_tests_its_page_and_its_entry_point(plugin: Path) -> None:
    name = plugin.name.removeprefix("shardkit_")
    assert (ROOT / "tests" / "backends" / f"test_{name}.py").exists()
    assert (ROOT / "docs" / "backends" / f"{name}.md").exists()
    assert name in shardkit.backends()
    assert (plugin / "py.typed").exists()


def loaded_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after some code."""
    script = f"import sys\n{code}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = LIBRARIES | {"torch", "transformers", "numpy", "matplotlib"}


def test_importing_shardkit_loads_neither_torch_nor_a_plugin() -> None:
    loaded = loaded_after("import shardkit")
    assert not loaded & (HEAVY | {"pluggy", "click", "rich"} | {plugin.name for plugin in PLUGINS})


def test_listing_backends_loads_neither_torch_nor_a_library() -> None:
    assert not loaded_after("import shardkit; assert len(shardkit.backends()) >= 3") & HEAVY


def test_declaring_a_strategy_loads_no_torch() -> None:
    assert not loaded_after("import shardkit; shardkit.Strategy.parse('any:accumulate=2')") & HEAVY


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_asking_for_one_backend_loads_no_other(plugin: Path) -> None:
    name = plugin.name.removeprefix("shardkit_")
    loaded = loaded_after(f"from shardkit._registry import describe; describe({name!r})")
    assert plugin.name in loaded
    assert not loaded & ({other.name for other in PLUGINS} - {plugin.name})
    assert not loaded & HEAVY


def test_training_on_one_backend_loads_no_library_of_another() -> None:
    loaded = loaded_after(
        "import torch, shardkit\n"
        "model = torch.nn.Linear(2, 1)\n"
        "with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=.1), 'ddp') as session:\n"
        "    session.backward(session.model(torch.ones(2)).sum()); session.step()\n"
    )
    assert not loaded & LIBRARIES


def test_every_public_name_is_there() -> None:
    for name in shardkit.__all__:
        assert getattr(shardkit, name) is not None
    assert set(shardkit.__all__) <= set(dir(shardkit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardkit.nothing  # noqa: B018


def test_files_hold_one_idea() -> None:
    for path in [*CORE, *(file for plugin in PLUGINS for file in plugin.rglob("*.py"))]:
        assert len(path.read_text().splitlines()) <= 500, f"{path} is over 500 lines"
