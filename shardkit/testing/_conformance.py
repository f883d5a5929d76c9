"""The suite for one backend, run from outside of pytest, and what came of it."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from shardkit._registry import claims, describe
from shardkit.errors import InputError
from shardkit.testing._suite import NonconformingError
from shardkit.tools.listing import versions

Kind = Literal["right", "refused", "skipped", "failed"]

_SUITE = """\
from shardkit.testing import BackendSuite


class TestConformance(BackendSuite):
    backend = {backend!r}
    left_out = {left_out!r}
"""


@dataclass(frozen=True)
class Verdict:
    """What came of one test of the suite."""

    test: str
    strategy: str
    """Under which it ran; empty for what is asked of the backend itself."""
    kind: Kind
    text: str = ""
    """Of a refusal its message, of a test that was skipped the reason, of one that failed all that is known."""
    did: str = ""
    right: str = ""
    page: str = ""


@dataclass(frozen=True)
class Conformance:
    """What the suite found of a backend."""

    backend: str
    origin: str
    """The distribution that brings it, with its version."""
    seconds: float
    verdicts: tuple[Verdict, ...]
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def counts(self) -> Counter[str]:
        return Counter(verdict.kind for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something ran."""
        return not self.counts["failed"] and bool(self.counts["right"])

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        strategies: dict[str, dict[str, Any]] = {}
        for verdict in self.verdicts:
            column = strategies.setdefault(
                verdict.strategy, dict.fromkeys(("right", "refused", "skipped", "failed"), 0)
            )
            column[verdict.kind] += 1
        return {
            "backend": self.backend,
            "distribution": self.origin,
            "versions": self.versions,
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            **{kind: self.counts[kind] for kind in ("right", "refused", "skipped", "failed")},
            "strategies": strategies,
            "tests": [
                {key: value for key, value in vars(verdict).items() if value or key in ("test", "kind")}
                for verdict in self.verdicts
                if verdict.kind != "right"
            ],
        }


def conformance(
    backend: str,
    *,
    left_out: dict[str, str] | None = None,
    strategies: Sequence[str] = (),
    watch: Callable[[int, int, str], None] = lambda done, of, test: None,
) -> Conformance:
    """Run the suite for a backend and return what it found. Minutes, on processes of this machine's CPU.

    ``strategies`` are those of its variants that are run, all without any. ``left_out`` is as in
    :class:`shardkit.testing.BackendSuite`. ``watch`` is told after each test how many of how many are done, and which.

    Raises:
        BackendNotFoundError: no installed backend has this name.
        PluginError: its plugin is broken.
        InputError: one of the strategies isn't one of its variants.
    """
    variants = [variant.strategy for variant in describe(backend).variants_on("cpu")]
    for strategy in strategies:
        if strategy not in variants:
            raise InputError(f"backend {backend!r} declares {', '.join(variants)}, and not {strategy!r}")
    listener = _Listener(strategies, watch)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardkit-conformance-") as made:
        file = Path(made) / "test_conformance.py"
        file.write_text(_SUITE.format(backend=backend, left_out=left_out or {}))
        options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={made}"]
        code = pytest.main([*options, str(file)], plugins=[listener])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise InputError(
            f"the suite for backend {backend!r} doesn't run: {listener.problem or pytest.ExitCode(code).name}"
        )
    origin = claims()[backend][0].origin
    return Conformance(backend, origin, time.monotonic() - started, tuple(listener.verdicts))


class _Listener:
    """Follows pytest."""

    def __init__(self, strategies: Sequence[str], watch: Callable[[int, int, str], None]) -> None:
        self.verdicts: list[Verdict] = []
        self.problem = ""
        self._strategies = strategies
        self._watch = watch
        self._count = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problem = str(report.longrepr)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._strategies:
            items[:] = [item for item in items if _strategy(item) in ("", *self._strategies)]
        self._count = len(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.verdicts.append(self._verdict(item, call, report))
            self._watch(len(self.verdicts), self._count, item.name)
        return report

    def _verdict(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Verdict:
        name, strategy = item.name, _strategy(item)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return Verdict(name, strategy, "skipped", reason.removeprefix("Skipped: "))
        if report.passed:
            told = dict(item.user_properties).get("refused", "")
            return Verdict(name, strategy, "refused" if told else "right", str(told))
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, NonconformingError):
            return Verdict(name, strategy, "failed", str(error), error.did, error.right, error.page)
        return Verdict(name, strategy, "failed", str(report.longrepr))


def _strategy(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("strategy", "")) if callspec is not None else ""
