"""What the benchmarks print and write besides pytest-benchmark's own: tables, and what they were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _measure import tables

LIBRARIES = ("shardkit", "torch", "transformers", "fairscale", "deepspeed", "accelerate", "lightning-fabric")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardkit")
    group.addoption("--tables", metavar="FILE", help="write the tables to a Markdown file")
    group.addoption("--repeats", type=int, default=3, help="how often a peak of memory is measured (default: 3)")
    group.addoption("--blocks", type=int, default=9, help="rounds in which speed with a bound is measured (default: 9)")
    group.addoption("--processor", action="store_true", help="speed by seconds of the processor, not of the wall")
    group.addoption("--layers", type=int, default=26, help="layers of the model whose checkpoints are measured")
    group.addoption("--folder", metavar="DIR", help="where checkpoints are measured (default: the system's for files)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_load_at_start] = _load()
    # Of a test that failed before it had anything to report, its own error is enough.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all in this test")
    # One thread per rank, whoever starts it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_load_at_start = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def repeats(request: pytest.FixtureRequest) -> int:
    """How often a peak of memory is measured."""
    return int(request.config.getoption("--repeats"))


@pytest.fixture(scope="session")
def blocks(request: pytest.FixtureRequest) -> int:
    """In how many rounds the speed with a bound on memory is measured."""
    return int(request.config.getoption("--blocks"))


@pytest.fixture(scope="session")
def processor(request: pytest.FixtureRequest) -> bool:
    """Whether speed is measured in seconds of the processor, on a machine that others use."""
    return bool(request.config.getoption("--processor"))


@pytest.fixture(scope="session")
def layers(request: pytest.FixtureRequest) -> int:
    """How many layers the model has whose checkpoints are measured: 26 are 252 million parameters."""
    return int(request.config.getoption("--layers"))


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> str | None:
    """Where checkpoints are measured."""
    found = request.config.getoption("--folder")
    return None if found is None else str(found)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)
    machine_info["load"] = config.stash[_load_at_start]
    machine_info["versions"] = _versions()


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    # Names of a folder and of a branch say nothing to others; the commit does.
    for name in ("project", "branch"):
        commit_info.pop(name, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if tables:
        terminalreporter.section("side by side")
        terminalreporter.write_line(_text())


@pytest.fixture(autouse=True)
def written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the tables after each test, so that a run that is broken off leaves what it has."""
    yield
    file = request.config.getoption("--tables")
    if file:
        Path(file).write_text(f"{_circumstances(request.config)}\n{_text()}", encoding="utf-8")


def _text() -> str:
    return "\n".join(table.markdown() for table in tables.values())


def _circumstances(config: pytest.Config) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    command = shlex.join(["pytest", *config.invocation_params.args])
    return (
        f"Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}  \n"
        f"Machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}  \n"
        f"Versions: {versions}  \n"
        f"Load average (1, 5, 15 min): {config.stash[_load_at_start]} at the start, {_load()} at the end  \n"
        f"Command: `OMP_NUM_THREADS=1 {command}`\n"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _load() -> str:
    return ", ".join(f"{value:.2f}" for value in os.getloadavg())
