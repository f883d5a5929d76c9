"""Which version of a package is the first that differs from a good one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import Version

from shardkit.errors import InputError
from shardkit.parity._environments import parse_specs
from shardkit.parity._index import versions
from shardkit.parity._judge import pair_row
from shardkit.parity._measure import Arm, Listener, Side, arms_of, check_repeats, measure
from shardkit.parity._results import Row
from shardkit.parity._suite import settings
from shardkit.parity._upgrade import concerned, exit_code, opened
from shardkit.parity._work import Work, resolved


@dataclass(frozen=True)
class Tried:
    """A version that was tried: ``"same"``, ``"different"`` or ``"could not run"``, as set against the good one."""

    version: str
    verdict: str
    reason: str
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Bisection:
    """What came of a bisection.

    ``first`` is the first version that differs; between ``last_same`` and it lie only ``skipped`` ones, which could not
    run. ``first`` is None if the bad version doesn't differ, or could not run.
    """

    package: str
    good: str
    bad: str
    settings: dict[str, object]
    first: str | None
    last_same: str | None
    skipped: list[str]
    tried: list[Tried]
    exit_code: int
    summary: str
    kind: Literal["bisect"] = "bisect"


def bisect(
    package: str,
    good: str,
    bad: str,
    work: Work,
    strategies: Sequence[str] = (),
    *,
    controls: bool = True,
    repeats: int = 2,
    probe: bool = True,
    timeout: float = 120,
    listener: Listener | None = None,
) -> Bisection:
    """Find the first version between ``good`` and ``bad`` that differs from ``good`` in numbers or settings.

    Halves the releases between them, as the package index lists them; ``bad`` may be older than ``good``. A version
    that doesn't install or run is skipped for its neighbours. As every bisection it takes it that once a difference has
    come it stays. A run that differs from itself counts as different.

    Raises:
        ShardkitError: the work, a number, a version or the text of a strategy is wrong; the index can't be reached.
    """
    listener = listener or Listener()
    check_repeats(repeats)
    work, is_loop = resolved(work)
    specs = parse_specs(f"{package}=={good}"), parse_specs(f"{package}=={bad}")
    ends = [Version(next(iter(side)).version) for side in specs]
    package = next(iter(specs[0])).name
    if ends[0] == ends[1]:
        raise InputError(f"good and bad are the same version, {ends[0]}: a bisection needs two")
    names, _ = concerned(specs[0])
    arms, _ = arms_of(strategies, names, work.device, controls=controls, is_loop=is_loop)
    low, high = sorted(ends)
    line = sorted({low, high, *(version for version in versions(package) if low < version < high)})
    if ends[0] > ends[1]:
        line.reverse()
    search = _Search(package, work, arms, is_loop, repeats, probe, timeout, listener)
    first, last_same, skipped = search.between(line)
    code, text = _verdict(package, line, first, last_same, skipped, search.tried)
    shared = settings(work, repeats, is_loop)
    told = [str(version) for version in skipped]
    return Bisection(
        package, str(line[0]), str(line[-1]), shared, _text(first), _text(last_same), told, search.tried, code, text
    )


class _Search:
    def __init__(
        self,
        package: str,
        work: Work,
        arms: Sequence[Arm],
        is_loop: bool,
        repeats: int,
        probe: bool,
        timeout: float,
        listener: Listener,
    ) -> None:
        self.tried: list[Tried] = []
        self._package = package
        self._work = work
        self._arms = arms
        self._is_loop = is_loop
        self._repeats = repeats
        self._probe = probe
        self._timeout = timeout
        self._listener = listener
        self._good: Side | None = None

    def between(self, line: Sequence[Version]) -> tuple[Version | None, Version | None, list[Version]]:
        """Return the first version that differs, the last before it that doesn't, and those between that can't run."""
        self._good = self._measured(line[0])
        runnable = [arm for arm, found in self._good.arms.items() if found.failure is None]
        if not runnable:
            failure = next(iter(self._good.arms.values())).failure
            assert failure is not None
            self.tried.append(Tried(str(line[0]), "could not run", failure.headline))
            return None, None, []
        self.tried.append(Tried(str(line[0]), "good", f"{len(runnable)} of {len(self._arms)} strategies run"))
        self._arms = runnable
        if self._try(line[-1]) != "different":
            return None, None, []
        low, high = 0, len(line) - 1
        skipped: set[int] = set()
        while True:
            candidates = [at for at in range(low + 1, high) if at not in skipped]
            if not candidates:
                return line[high], line[low], [line[at] for at in sorted(skipped) if low < at < high]
            middle = (low + high) / 2
            at = min(candidates, key=lambda place: abs(place - middle))
            verdict = self._try(line[at])
            if verdict == "different":
                high = at
            elif verdict == "same":
                low = at
            else:
                skipped.add(at)

    def _try(self, version: Version) -> str:
        assert self._good is not None
        side = self._measured(version)
        known = [str(version), self.tried[0].version]
        rows = [pair_row(arm.strategy, arm.control, self._good.arms[arm], side.arms[arm], known) for arm in self._arms]
        verdict = {0: "same", 1: "different", 2: "could not run"}[exit_code(rows)]
        reason = next((row.reason for row in rows if row.verdict == verdict), rows[0].reason)
        self.tried.append(Tried(str(version), verdict, reason, rows))
        self._listener.note(f"{self._package} {version}: {verdict}: {reason}")
        return verdict

    def _measured(self, version: Version) -> Side:
        specs = parse_specs(f"{self._package}=={version}")
        with opened([(str(version), specs)], self._arms, self._listener) as sides:
            [(side, _)] = sides
            measure(
                [side],
                self._work,
                self._arms,
                is_loop=self._is_loop,
                repeats=self._repeats,
                probe=self._probe,
                timeout=self._timeout,
                listener=self._listener,
            )
        return side


def _verdict(
    package: str,
    line: Sequence[Version],
    first: Version | None,
    last_same: Version | None,
    skipped: Sequence[Version],
    tried: Sequence[Tried],
) -> tuple[int, str]:
    if first is None:
        last = tried[-1]
        if last.verdict == "same":
            return 1, f"{package} {line[-1]} doesn't differ from {line[0]}: there is nothing to find"
        return 2, f"{package} {last.version} could not run: {last.reason}"
    between = f"; {', '.join(map(str, skipped))} between them could not run" if skipped else ""
    reason = next(one.reason for one in tried if one.version == str(first))
    return 0, f"{package} {first} is the first that differs, {last_same} the last that doesn't{between}: {reason}"


def _text(version: Version | None) -> str | None:
    return None if version is None else str(version)
