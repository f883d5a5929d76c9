"""The pytest plugin: a marker and a fixture that hold a loop, under several strategies, to a recorded trace.

Pytest loads it where shardkit is installed; it imports nothing heavy before a test uses the fixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardkit._session import Session
    from shardkit.parity._results import Comparison
    from shardkit.parity._trace import Trace

    Loop = Callable[[Any, Callable[[Session], Any]], Any]

_MARK = (
    "parity(*strategies, against=None, processes=2, timeout=300, exact=False): run the test under each strategy; the "
    'fixture "parity" holds its loop to the trace in the file "against", or to the first strategy. See docs/parity.md'
)
_EXAMPLE = '@pytest.mark.parity("one-strategy", "another", against="loop.trace")'
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "against": ((str, Path), "a path, relative to the test's file"),
    "processes": ((int,), "a number of ranks, at least 1"),
    "timeout": ((int, float), "a number of seconds above 0"),
    "exact": ((bool,), "True or False"),
}


@dataclass(frozen=True)
class Parity:
    """What the fixture ``parity`` gives: one strategy, and how to hold a loop to what is expected of it."""

    strategy: str
    first: str
    """The first strategy of the mark: the one that is recorded."""
    against: Path | None
    processes: int
    timeout: float
    exact: bool
    recording: bool
    """Whether pytest runs with ``--parity-record``."""
    _folder: Path
    _module: ModuleType | None

    def run(self, loop: Loop, strategy: str | None = None) -> Trace:
        """Run the loop in ``processes`` new processes under the strategy, and return its trace.

        ``loop(strategy, record)`` prepares a session and trains within ``with record(session):``. It is sent to the
        processes by value, with what it refers to in the test's module.

        Raises:
            InputError: the loop doesn't take two arguments.
            StrategyError: the text of the strategy is wrong.
            BackendNotFoundError: no installed backend has its name.
            LaunchError: a rank failed, or the time is up.
        """
        from shardkit import _registry
        from shardkit._launch import launch
        from shardkit._prepare import resolve
        from shardkit.parity._loop import check_loop
        from shardkit.parity._trace import Trace

        check_loop(loop)
        text = strategy or self.strategy
        _registry.describe(resolve(text).backend)
        path = self._folder / "run.trace"
        path.unlink(missing_ok=True)
        with _by_value(self._module):
            launch(_ranked, loop, text, str(path), processes=self.processes, timeout=self.timeout)
        return Trace.load(path)

    def check(self, loop: Loop) -> Comparison | None:
        """Run the loop, and fail the test unless its trace is that which is expected, but for round-off.

        With ``exact`` it is to be the same to the last bit. Returns the comparison; None for the first strategy where
        it is the one that is recorded, or that the others are held to.
        """
        from shardkit.errors import ShardkitError
        from shardkit.parity.outputs.write import as_text

        try:
            found = self._compared(loop)
        except ShardkitError as error:
            # With the traceback of the rank that failed, where one did; that of this process says nothing more.
            pytest.fail(f"{self.strategy}: {type(error).__name__}: {error}", pytrace=False)
        good = ("identical",) if self.exact else ("identical", "round-off")
        if found is not None and (found.verdict not in good or found.exit_code):
            asked = "exact=True asks for the same to the last bit\n" if found.verdict == "round-off" else ""
            pytest.fail(asked + as_text(found), pytrace=False)
        return found

    def _compared(self, loop: Loop) -> Comparison | None:
        from shardkit.parity._compare import compare
        from shardkit.parity._trace import Trace

        is_first = self.strategy == self.first
        if self.against is not None and self.recording:
            if not is_first:
                pytest.skip(f"--parity-record records the first strategy, {self.first}, and compares nothing")
            self.run(loop).save(self.against)
            return None
        if self.against is None:
            expected = self.run(loop, self.first)
            if is_first:
                return None
            name = self.first
        elif not self.against.exists():
            pytest.fail(
                f"there is no trace {str(self.against)!r}: record it with pytest --parity-record", pytrace=False
            )
        else:
            expected, name = Trace.load(self.against), str(self.against)
        return replace(compare(expected, self.run(loop)), a=name, b=self.strategy)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # It comes as an entry point, and may be asked for with -p or pytest_plugins too: pytest takes no plugin twice.
    for name in ("shardkit", __name__):
        if not pluginmanager.has_plugin(name):
            pluginmanager.set_blocked(name)
    parser.getgroup("shardkit").addoption(
        "--parity-record",
        action="store_true",
        help="write anew the traces that tests marked parity are held to, with each one's first strategy",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test without the mark may have a fixture of its own by this name.
    mark = metafunc.definition.get_closest_marker("parity")
    asks = "parity" in metafunc.fixturenames
    # A mark of a class or a module is for those of its tests that ask for the fixture.
    if mark is None or not (asks or mark in metafunc.definition.own_markers):
        return
    wrong = _wrong(mark) or ("" if asks else "the test has no argument 'parity'")
    if wrong:
        pytest.fail(f"{metafunc.definition.nodeid}: {wrong}: {_EXAMPLE}, and parity.check(loop)", pytrace=False)
    metafunc.parametrize("parity", list(dict.fromkeys(mark.args)), indirect=True)


def _wrong(mark: pytest.Mark) -> str:
    """Return what is wrong with a mark, or nothing."""
    if not mark.args or not all(isinstance(one, str) and one for one in mark.args):
        return f"the mark parity takes one strategy or more, as strings, not {mark.args!r}"
    for name, value in mark.kwargs.items():
        if name not in _TYPES:
            return f"the mark parity has no {name!r}; it has {', '.join(_TYPES)}"
        types, words = _TYPES[name]
        if name == "against" and value is None:
            continue
        fits = isinstance(value, types) and (name == "exact" or not isinstance(value, bool))
        if not fits or (isinstance(value, int | float) and not (name == "exact" or value > 0)):
            return f"{name} of the mark parity is {words}, not {value!r}"
    return ""


@pytest.fixture
def parity(request: pytest.FixtureRequest, tmp_path: Path) -> Parity:
    """One strategy of the mark ``parity``, and the trace that it is held to."""
    mark = request.node.get_closest_marker("parity")
    if mark is None:
        pytest.fail(f"a test with the fixture 'parity' is marked with its strategies: {_EXAMPLE}", pytrace=False)
    against = mark.kwargs.get("against")
    return Parity(
        strategy=request.param,
        first=mark.args[0],
        against=None if against is None else request.path.parent / against,
        processes=mark.kwargs.get("processes", 2),
        timeout=mark.kwargs.get("timeout", 300),
        exact=mark.kwargs.get("exact", False),
        recording=request.config.getoption("--parity-record"),
        _folder=tmp_path,
        _module=getattr(request, "module", None),
    )


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Return a context in which what the module defines is sent by value: ranks may be unable to import it."""
    import cloudpickle

    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _ranked(loop: Loop, strategy: str, path: str) -> None:
    from shardkit._prepare import resolve
    from shardkit.parity._loop import run_loop

    run_loop(loop, resolve(strategy), path)
