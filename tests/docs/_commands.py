"""Reads commands as they stand in the documentation, and refuses what their programs would.

- ``shardkit``: parsed by the command line itself, without running; then its strategies are resolved, options and all,
  its workloads found with their settings, its versions, precisions and sizes read.
- ``pip install``: constraint files exist, and extras of shardkit are those of pyproject.toml.
- ``pytest``: the paths exist, and so do the markers of ``-m``.
- ``torchrun``: parsed by torch's parser; the script is a file of the page or of the repository.
- ``python``: there is such a module, or such a script in the repository.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import click
from packaging.requirements import Requirement

import shardkit
from shardkit import _registry
from shardkit._options import typed_options
from shardkit._prepare import resolve
from shardkit._sizes import parse_bytes
from shardkit.cli import main
from shardkit.parity._specs import check_name, pair, parse_specs
from shardkit.tools.compare import split_strategies
from shardkit.workloads._find import any_function
from tests.docs._blocks import ROOT, Block

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OTHER_OPTIONS = {
    "--parity-record",
    *("--tables", "--benchmark-json", "--repeats", "--blocks", "--processor", "--folder", "--layers"),
}
"""Options of our pytest plugin, and of the benchmarks."""


def lines(block: Block) -> list[str]:
    """Return the commands of a block: all lines of bash, and those behind a prompt of a console."""
    if block.language == "console":
        return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    return [line for line in block.text.splitlines() if line.strip()]


def check_script(text: str) -> None:
    """Refuse what bash can't parse."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_line(line: str) -> None:
    """Check each command of a line, in the current folder."""
    for words in simple_commands(line):
        name = Path(words[0]).name
        assert name in _CHECKS, f"nothing here checks {name!r} of {line!r}"
        _CHECKS[name](words[1:])


def simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "&&"]:
        if set(word) <= set("&|;"):
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)


def check_shardkit(words: list[str]) -> None:
    command: click.Command = main
    context = command.make_context("shardkit", list(words))
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    for name, value in context.params.items():
        if value is not None and name in _VALUES:
            _VALUES[name](value)
    if "before" in context.params:
        pair(parse_specs(context.params["before"]), parse_specs(context.params["after"]))


def check_inline(text: str) -> None:
    """Check a command that may be cut short, by its name and those of its options; an option; or a strategy."""
    words = shlex.split(text) if text.startswith(("shardkit ", "--")) else []
    strategy = re.fullmatch(r'"?((\w+):(\w+=[\w.]+,?)+)"?', text)
    if words[:1] == ["shardkit"]:
        command: click.Command = main
        words = words[1:]
        while words and isinstance(command, click.Group):
            assert words[0] in command.commands or words[0].startswith("-"), f"there is no command {words[0]!r}"
            command = command.commands.get(words.pop(0), command)
        known = _options(command)
    else:
        known = _options(main) | OTHER_OPTIONS
    for word in words:
        if word.startswith("--") and word not in known:
            assert word in _options_of_trainer(), f"there is no option {word}"
    if strategy is not None and strategy[2] in shardkit.backends():
        check_strategy(strategy[1])


def commands(command: click.Command = main, path: str = "shardkit") -> Iterator[tuple[str, click.Command]]:
    """Yield a command's path and itself, and all below it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


def _options(command: click.Command) -> set[str]:
    params = [param for _, each in commands(command) for param in each.params]
    return {"--help", *(name for each in params for name in (*each.opts, *each.secondary_opts))}


@cache
def _options_of_trainer() -> set[str]:
    from examples import seq2seq

    parser = seq2seq.parser()
    return {name for action in parser._actions for name in action.option_strings}


def check_strategy(text: str) -> None:
    strategy = resolve(text)
    if strategy.backend != "auto":
        typed_options(_registry.describe(strategy.backend), strategy.options)


def _check_strategies(texts: tuple[str, ...]) -> None:
    for text in split_strategies(texts):
        check_strategy(text)


def _check_precisions(text: str) -> None:
    assert not text or set(text.split(",")) <= {"fp32", "bf16", "fp16"}, text


_VALUES: dict[str, Callable[..., object]] = {
    "strategies": _check_strategies,
    "strategy": check_strategy,
    "baseline": check_strategy,
    "workload": any_function,
    "memory": parse_bytes,
    "precisions": _check_precisions,
    "package": check_name,
}


def _check_pip(words: list[str]) -> None:
    if words[0] == "uninstall":
        extras = PROJECT["project"]["optional-dependencies"].values()
        assert set(words[1:]) <= {Requirement(library).name for libraries in extras for library in libraries}
        return
    assert words[0] == "install", words
    rest = iter(words[1:])
    for word in rest:
        if word == "-c":
            assert (ROOT / next(rest)).is_file()
        elif word not in ("-e", "-q"):
            requirement = Requirement(re.sub(r"^\.", "shardkit", word))
            assert requirement.name == "shardkit", f"{word!r} isn't this project"
            assert requirement.extras <= set(PROJECT["project"]["optional-dependencies"]), word


def _check_pytest(words: list[str]) -> None:
    markers = {marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    rest = iter(words)
    for word in rest:
        if word == "-m":
            assert next(rest) in markers
        elif not word.startswith("-"):
            assert (ROOT / word).exists(), f"there is no {word}"


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"there is no module {words[1]}"
    else:
        assert (ROOT / words[0]).is_file(), f"there is no {words[0]}"


def _check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    script = get_args_parser().parse_args(words).training_script
    assert Path(script).is_file() or (ROOT / script).is_file(), script


def _check_compare(words: list[str]) -> None:
    from pytest_benchmark.cli import make_parser

    make_parser().parse_args(words)


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "shardkit": check_shardkit,
    "pip": _check_pip,
    "pytest": _check_pytest,
    "python": _check_python,
    "python3": _check_python,
    "torchrun": _check_torchrun,
    "pytest-benchmark": _check_compare,
    "echo": lambda words: None,
}
