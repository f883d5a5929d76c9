"""Every code block of README and docs is right: run, or read by what would read it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from shardkit import Strategy
from shardkit.cli import main
from shardkit.errors import ShardkitError
from shardkit.testing import _ahead
from tests.docs import _blocks, _commands, setups
from tests.docs._blocks import Block, Program
from tests.docs._run import launch, set_up

EXEMPT: set[str] = set()
"""Where blocks stand that are not run, whose reason is above them."""

LANGUAGES = {"python", "bash", "console", "toml", "json", "yaml", "text"}
"""``text`` is what a program printed, or no code at all."""

BLOCKS = [block for page in _blocks.pages() for block in _blocks.blocks(page)]
PROGRAMS = {program.where: program for page in _blocks.pages() for program in _blocks.programs(page)}


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


def run_of(page: str) -> list[Block]:
    return [block for block in _blocks.blocks(page) if "run" in block.marks]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in BLOCKS])
def test_a_block_says_its_language_and_what_it_asks_of_its_test(block: Block) -> None:
    assert block.language in LANGUAGES
    assert set(block.marks) <= _blocks.MARKS | _blocks.OTHERS
    for mark in ("setup", "run"):
        assert mark not in block.marks or hasattr(setups, block.marks[mark]), block.marks
    for mark in ("slow", "not run"):
        assert block.marks.get(mark, "a reason"), f"{mark} wants a reason"


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.where) for block in BLOCKS if _blocks.examples(block.page).exists()]
)
def test_a_program_that_a_page_shows_is_that_of_its_examples(block: Block) -> None:
    if "file" in block.marks:
        assert block.text == (_blocks.examples(block.page) / block.marks["file"]).read_text()


def test_what_is_not_run_is_known() -> None:
    assert {block.where for block in BLOCKS if "not run" in block.marks} == EXEMPT


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, marks=[pytest.mark.slow] if program.slow else [])
        for where, program in PROGRAMS.items()
        if setups.RANKS.get(program.setup, 2)
    ],
)
def test_a_program_runs(where: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = str(tmp_path_factory.getbasetemp())
    wanted = [(other, base) for (other,) in _ahead.selected(request.session, request.function, "where")]
    _ahead.result((where, base), wanted, _launched)


def _launched(where: str, base: str) -> None:
    launch(PROGRAMS[where], Path(base) / "programs" / re.sub(r"\W", "-", where))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=where, marks=[pytest.mark.slow] if program.slow else [])
        for where, program in PROGRAMS.items()
        if not setups.RANKS.get(program.setup, 2)
    ],
)
def test_a_program_that_launches_ranks_runs(program: Program, tmp_path: Path) -> None:
    launch(program, tmp_path / "program")


@pytest.mark.parametrize("program", [pytest.param(program, id=where) for where, program in PROGRAMS.items()])
def test_a_program_is_python(program: Program) -> None:
    for block in program.blocks:
        compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", of("bash", "console"))
def test_a_command_can_be_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _blocks.write_files(block.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = _commands.lines(block)
    assert commands
    _commands.check_script("\n".join(commands))
    for line in commands:
        _commands.check_line(line)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if any("slow" in block.marks for block in run_of(page)) else [])
        for page in _blocks.pages()
        if run_of(page)
    ],
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _blocks.write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in run_of(page):
        set_up(block.marks["run"], tmp_path)
        told = []
        for line in _commands.lines(block):
            capfd.readouterr()
            for words in _commands.simple_commands(line):
                _run_command(words)
            told += [f"$ {line}", *capfd.readouterr().out.splitlines()]
        if block.language == "console":
            _assert_shown(block.text, told)


def _run_command(words: list[str]) -> None:
    if words[0] == "shardkit":
        # A doctor may find something on this machine, and two runs of a page may differ.
        allowed = (0, 1) if {"doctor", "compare"} & set(words) else (0,)
        assert (main.main(words[1:], "shardkit", standalone_mode=False) or 0) in allowed
    else:
        assert words[0] == "torchrun"
        # The script takes what is given from tests.docs.
        places = os.pathsep.join([str(_blocks.ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": places}, check=False)
        assert done.returncode == 0
        if words[-1] == "train.py":  # the README's, which saves
            assert list(Path("checkpoints").iterdir())


def _assert_shown(shown: str, told: list[str]) -> None:
    """Each line that is shown was told, in this order, but for numbers; ``...`` stands for any lines."""
    left = iter([_shape(line) for line in told])
    for line in shown.splitlines():
        assert line == "..." or _shape(line) in left, f"not told, or not at this place: {line}"


def _shape(line: str) -> str:
    return re.sub(r"─+", "─", re.sub(r"[\d.]+(e-?\d+)?", "#", " ".join(line.split())))


@pytest.mark.parametrize("block", of("toml", "json"))
def test_a_configuration_is_one(block: Block, tmp_path: Path) -> None:
    read = tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)
    if "backend" in read:
        path = tmp_path / f"strategy.{block.language}"
        path.write_text(block.text)
        assert Strategy.load(path).backend == read["backend"]
        _commands.check_strategy(str(path))
    elif block.language == "json":
        (tmp_path / "config.json").write_text(block.text)
        _commands.check_strategy(str(tmp_path / "config.json"))
    else:
        known = _commands.PROJECT["project"]
        groups = set(known["entry-points"]) | {"shardkit.wrappers"}
        assert set(read) <= {"project", "build-system", "tool"}
        assert set(read["project"].get("entry-points", {})) <= groups


@pytest.mark.parametrize("block", of("yaml"))
def test_the_commands_of_a_workflow_can_be_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _blocks.write_files(block.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    pins = ",".join(f"{name}=={importlib.metadata.version(name)}" for name in ("deepspeed", "fairscale"))
    read = 0
    for script in _scripts(yaml.safe_load(block.text)):
        _commands.check_script(script)
        for line in script.splitlines():
            if line.split()[0] in ("pip", "shardkit"):
                _commands.check_line(line.replace("$old", pins).replace("$new", pins))
                read += 1
    assert read


def _scripts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["run"]] if isinstance(node.get("run"), str) else []
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _scripts(child)


@pytest.mark.parametrize("page", _blocks.pages())
def test_what_running_text_names_exists(page: str) -> None:
    """Commands of shardkit with their options, options by themselves, and strategies."""
    for line, text in _blocks.inline(page):
        try:
            _commands.check_inline(text)
        except (AssertionError, ShardkitError) as error:
            error.add_note(f"{page}:{line}: {text}")
            raise


@pytest.mark.parametrize(
    "line",
    [
        line.partition("Example: ")[2]
        for _, command in _commands.commands()
        for line in (command.help or "").splitlines()
        if line.strip().startswith("Example: ")
    ],
)
def test_the_example_in_a_commands_help_can_be_read(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _blocks.write_files("docs/workloads.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    _commands.check_line(line)


def test_every_command_stands_in_the_documentation() -> None:
    told = "\n".join(text for page in _blocks.pages() for _, text in _blocks.inline(page))
    told += "\n".join(block.text for block in BLOCKS)
    for path, command in _commands.commands():
        assert isinstance(command, click.Group) or path in told, f"no page tells of {path!r}"


def test_an_example_in_a_docstring_runs() -> None:
    """It runs in the names of its module. One is indented, behind a line that ends with two colons."""
    read = 0
    for path in sorted((_blocks.ROOT / "shardkit").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for example in re.findall(r"::\n\n((?:    .*\n|\n)+)", f"{ast.get_docstring(node) or ''}\n"):
                    name = ".".join(path.relative_to(_blocks.ROOT).with_suffix("").parts)
                    exec(
                        compile(textwrap.dedent(example), str(path), "exec"), dict(vars(importlib.import_module(name)))
                    )
                    read += 1
    assert read
