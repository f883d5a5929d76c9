"""The same work under two versions of a library: what an upgrade changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from packaging.utils import canonicalize_name

from shardkit import _registry
from shardkit.errors import PluginError
from shardkit.parity._environments import (
    Environment,
    EnvironmentFailure,
    Specs,
    build_all,
    check_import,
    pair,
    parse_specs,
    stale_locks,
)
from shardkit.parity._judge import pair_row
from shardkit.parity._measure import (
    Arm,
    Listener,
    Side,
    arms_of,
    check_repeats,
    installed_backends,
    measure,
    preload_of,
)
from shardkit.parity._results import Failure, Report, Row
from shardkit.parity._results import Side as SideFacts
from shardkit.parity._runner import Runner
from shardkit.parity._suite import settings, versions_of
from shardkit.parity._work import Work, resolved
from shardkit.tools.listing import distribution


def upgrade(
    before: str,
    after: str,
    work: Work,
    strategies: Sequence[str] = (),
    *,
    controls: bool = True,
    repeats: int = 2,
    probe: bool = True,
    timeout: float = 120,
    listener: Listener | None = None,
) -> Report:
    """Train the work under each strategy in two environments that differ only in some packages, and compare.

    ``before`` and ``after`` read ``name==version``, several separated by commas; ``name==installed`` is the version
    that is there. Without ``strategies`` it is every variant of the backends that the packages concern: a backend whose
    library is named, or all if none is. With ``controls`` each library also runs by itself, with its own defaults.
    Strategies run in versions that their plugin wasn't written for as well: what comes of it is the question.

    Raises:
        ShardkitError: the work, a number, a version or the text of a strategy is wrong.
    """
    listener = listener or Listener()
    check_repeats(repeats)
    work, is_loop = resolved(work)
    old, new = pair(parse_specs(before), parse_specs(after))
    names, notes = concerned(old)
    arms, more = arms_of(strategies, names, work.device, controls=controls, is_loop=is_loop)
    notes += more
    for note in notes:
        listener.note(note)
    with opened([("before", old), ("after", new)], arms, listener) as sides:
        pairs = [side for side, _ in sides]
        measure(pairs, work, arms, is_loop=is_loop, repeats=repeats, probe=probe, timeout=timeout, listener=listener)
        explain_hangs(sides)
    one, other = pairs
    versions = [spec.version for spec in (*old, *new)]
    rows = [pair_row(arm.strategy, arm.control, one.arms[arm], other.arms[arm], versions) for arm in arms]
    facts = [facts_of(side, environment) for side, environment in sides]
    facts[-1].notes.extend(notes)
    return Report(
        "upgrade",
        {**settings(work, repeats, is_loop), "before": str(old), "after": str(new)},
        facts,
        rows,
        exit_code(rows),
        summary(rows, old, new),
    )


def concerned(specs: Specs) -> tuple[list[str], list[str]]:
    """Return the backends that packages concern, and notes: those whose library is named, or all installed ones."""
    wanted = {spec.name for spec in specs}
    named = []
    for name in _registry.claims():
        try:
            backend = _registry.describe(name)
        except PluginError:
            continue
        if backend.library is not None and canonicalize_name(distribution(backend)) in wanted:
            named.append(name)
    return (named, []) if named else installed_backends()


@contextmanager
def opened(
    wanted: Sequence[tuple[str, Specs]], arms: Sequence[Arm], listener: Listener
) -> Iterator[list[tuple[Side, Environment | EnvironmentFailure]]]:
    """Return a context with the environments, each with a process that runs tasks in it, or the reason why not."""
    built = build_all([specs for _, specs in wanted], progress=lambda name, text: listener.note(f"{name}: {text}"))
    with ExitStack() as stack:
        sides: list[tuple[Side, Environment | EnvironmentFailure]] = []
        for (name, _), environment in zip(wanted, built, strict=True):
            try:
                if isinstance(environment, EnvironmentFailure):
                    raise environment
                check_import(environment)
            except EnvironmentFailure as failure:
                stage = "import" if failure.stage in ("did not import", "timed out") else "install"
                listener.note(f"{name}: {failure}")
                told = Failure(stage, str(failure), "\n".join(failure.details))
                sides.append((Side(name, None, told), environment))
                continue
            stack.enter_context(environment.in_use())
            runner = stack.enter_context(Runner(environment.variables(), preload=preload_of(arms)))
            sides.append((Side(name, runner, any_version=True), environment))
        yield sides


def explain_hangs(sides: Sequence[tuple[Side, Environment | EnvironmentFailure]]) -> None:
    """Say of runs that took too long what a build lock has to do with it, if one is there."""
    for side, environment in sides:
        if isinstance(environment, Environment) and (locks := stale_locks(environment.extensions)):
            for arm, found in side.arms.items():
                if found.failure is not None and found.failure.stage == "timeout":
                    text = f"{found.failure.headline}; it may wait for the build lock {locks[0]}"
                    failure = Failure("timeout", text, found.failure.details)
                    side.arms[arm] = type(found)(failure, **{k: v for k, v in vars(found).items() if k != "failure"})


def facts_of(side: Side, environment: Environment | EnvironmentFailure) -> SideFacts:
    if isinstance(environment, EnvironmentFailure):
        wanted = {environment.package: environment.version}
        return SideFacts(side.name, wanted, {}, failure=side.failure)
    wanted = {spec.name: spec.version for spec in environment.specs}
    notes = list(environment.notes)
    return SideFacts(side.name, wanted, versions_of(side), notes, side.failure, side.baseline)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if anything differs, else 2 if something could not run or nothing ran, else 0."""
    verdicts = {row.verdict for row in rows}
    if "different" in verdicts:
        return 1
    return 2 if "could not run" in verdicts or not verdicts & {"same", "round-off"} else 0


def summary(rows: Sequence[Row], before: Specs, after: Specs) -> str:
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in {row.verdict for row in rows}}
    told = {
        "different": "differ",
        "could not run": "could not run",
        "round-off": "are the same but for round-off",
        "same": "are the same to the last bit",
        "refused": "are refused under both",
    }
    parts = [f"{count[verdict]} {words}" for verdict, words in told.items() if count.get(verdict)]
    noun = "run" if len(rows) == 1 else "runs"
    return f"{before} -> {after}: of {len(rows)} {noun} {', '.join(parts)}"
