"""The pytest plugin: a marker and a fixture that hold a loop, under several strategies, to a recorded trace.

Pytest loads it where shardkit is installed; it imports nothing heavy before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardkit._session import Session
    from shardkit.parity._results import Comparison
    from shardkit.parity._trace import Trace

_MARK = (
    "parity(*strategies, against=None, processes=2, timeout=300, exact=False): run the test under each strategy; the "
    'fixture "parity" holds its loop to the trace in the file "against", or to the first strategy. See docs/parity.md'
)
_KEYWORDS = ("against", "processes", "timeout", "exact")


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

    def run(self, loop: Callable[[str, Callable[[Session], Any]], Any], strategy: str | None = None) -> Trace:
        """Run the loop in ``processes`` new processes under the strategy, and return its trace.

        ``loop(strategy, record)`` prepares a session and trains within ``with record(session):``. It is sent to the
        processes by value.

        Raises:
            LaunchError: a rank failed, or the time is up.
        """
        from shardkit._launch import launch
        from shardkit.parity._trace import Trace

        path = self._folder / "run.trace"
        launch(_ranked, loop, strategy or self.strategy, str(path), processes=self.processes, timeout=self.timeout)
        return Trace.load(path)

    def check(self, loop: Callable[[str, Callable[[Session], Any]], Any]) -> Comparison | None:
        """Run the loop, and fail the test unless its trace is that which is expected, but for round-off.

        With ``exact`` it is to be the same to the last bit. Returns the comparison; None where the trace was recorded
        instead.
        """
        from shardkit.parity._compare import compare
        from shardkit.parity._trace import Trace
        from shardkit.parity.outputs.write import as_text

        if self.against is None:
            if self.strategy == self.first:
                self.run(loop)
                return None
            expected = self.run(loop, self.first)
            name = self.first
        elif self.recording and self.strategy == self.first:
            self.run(loop).save(self.against)
            return None
        elif not self.against.exists():
            pytest.fail(
                f"there is no trace {str(self.against)!r}: record it with pytest --parity-record", pytrace=False
            )
        else:
            expected, name = Trace.load(self.against), self.against.name
        found = replace(compare(expected, self.run(loop)), a=name, b=self.strategy)
        good = ("identical",) if self.exact else ("identical", "round-off")
        if found.verdict not in good:
            pytest.fail(as_text(found), pytrace=False)
        return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("shardkit").addoption(
        "--parity-record", action="store_true", help="write the traces that tests marked parity are held against anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "parity" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("parity")
        if mark is None or not mark.args or not all(isinstance(one, str) for one in mark.args):
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: a test with the fixture 'parity' is marked with its strategies: "
                '@pytest.mark.parity("ddp", "deepspeed:stage=2", against="loop.trace")'
            )
        unknown = sorted(mark.kwargs.keys() - set(_KEYWORDS))
        if unknown:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: the mark parity has no {', '.join(unknown)}; it has "
                f"{', '.join(_KEYWORDS)}"
            )
        metafunc.parametrize("parity", mark.args, indirect=True)


@pytest.fixture
def parity(request: pytest.FixtureRequest, tmp_path: Path) -> Parity:
    """One strategy of the mark ``parity``, and the trace that it is held to."""
    mark = request.node.get_closest_marker("parity")
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
    )


def _ranked(loop: Callable[[str, Callable[[Session], Any]], Any], strategy: str, path: str) -> None:
    from shardkit.parity._loop import run_loop

    run_loop(loop, strategy, path)
