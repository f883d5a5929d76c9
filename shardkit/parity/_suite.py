"""All strategies side by side on one workload, in the environment as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardkit.parity._compare import compare
from shardkit.parity._judge import FACTOR, single_row
from shardkit.parity._measure import Listener, Side, arms_of, check_repeats, installed_backends, measure, preload_of
from shardkit.parity._results import Comparison, Report, Row
from shardkit.parity._results import Side as SideFacts
from shardkit.parity._runner import Runner
from shardkit.parity._work import OF_A_LOOP, Work, resolved


def run(
    work: Work,
    strategies: Sequence[str] = (),
    *,
    controls: bool = False,
    repeats: int = 2,
    probe: bool = False,
    timeout: float = 120,
    listener: Listener | None = None,
) -> Report:
    """Train the work under each strategy, or every variant that is installed, and judge each.

    Each runs ``repeats`` times in fresh processes, and is held against one process of float64 and torch's own DDP
    (at most 4 times as far from float64); of a loop there are neither, and each is held to the first strategy. With
    ``controls`` the libraries of a workload run by themselves as well. One that fails, or takes longer than ``timeout``
    seconds, is a row that says so.

    Raises:
        ShardkitError: the work, a number or the text of a strategy is wrong.
    """
    listener = listener or Listener()
    check_repeats(repeats)
    work, is_loop = resolved(work)
    names, notes = installed_backends()
    arms, more = arms_of(strategies, names, work.device, controls=controls, is_loop=is_loop)
    if not strategies:
        notes += more
    for note in notes if not strategies else ():
        listener.note(note)
    with Runner({}, preload=preload_of(arms)) as runner:
        side = Side("run", runner)
        measure([side], work, arms, is_loop=is_loop, repeats=repeats, probe=probe, timeout=timeout, listener=listener)
    plain = side.baseline.distances if side.baseline is not None else None
    rows = [single_row(arm.strategy, arm.control, side.arms[arm], plain) for arm in arms]
    if is_loop:
        rows = _held_to_the_first(rows)
    return Report(
        "run",
        settings(work, repeats, is_loop),
        [SideFacts("run", {}, versions_of(side), notes, baseline=side.baseline)],
        rows,
        exit_code(rows),
        summary(rows),
    )


def _held_to_the_first(rows: list[Row]) -> list[Row]:
    """Return the rows of a loop, all but the first compared with it."""
    first, *others = rows
    if first.before.trace is None:
        why = f"{first.strategy}, which it would be held to, did not run"
        return [first, *(replace(row, reason=why) if row.verdict == "unjudged" else row for row in others)]
    found = [replace(first, reason="the others are held to it") if first.verdict == "unjudged" else first]
    for row in others:
        if row.verdict == "unjudged" and row.before.trace is not None:
            compared = _named(compare(first.before.trace, row.before.trace), first.strategy, row.strategy)
            told = next((one.sentence for one in compared.diagnoses), f"it parts from {first.strategy}")
            same = compared.verdict in ("identical", "round-off")
            verdict, reason = ("parity", "") if same else ("no parity", told)
            found.append(replace(row, verdict=verdict, reason=reason, comparison=compared))
        else:
            found.append(row)
    return found


def _named(found: Comparison, a: str, b: str) -> Comparison:
    """Return a comparison that speaks of two strategies."""
    told = [replace(one, sentence=one.sentence.replace("run A", a).replace("run B", b)) for one in found.diagnoses]
    return replace(found, a=a, b=b, diagnoses=told)


def settings(work: Work, repeats: int, is_loop: bool) -> dict[str, object]:
    """Return what holds for all runs; a loop has its own sizes, and is held to no reference."""
    if is_loop:
        return {name: getattr(work, name) for name in ("target", *OF_A_LOOP)} | {"repeats": repeats}
    return {**vars(work), "repeats": repeats, "factor": FACTOR}


def versions_of(side: Side) -> dict[str, str]:
    """Return the versions that the runs of a side told."""
    found: dict[str, str] = {}
    for one in [side.baseline, *side.arms.values()]:
        if one is not None and one.trace is not None:
            found |= one.trace.facts["versions"]
    return found


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if a strategy isn't at parity, else 2 if one could not run, else 0."""
    verdicts = {row.verdict for row in rows}
    return 1 if "no parity" in verdicts else 2 if verdicts & {"could not run", "refused"} else 0


def summary(rows: Sequence[Row]) -> str:
    counts = {
        verdict: sum(row.verdict == verdict for row in rows) for verdict in dict.fromkeys(r.verdict for r in rows)
    }
    noun = "strategy" if len(rows) == 1 else "strategies"
    return f"{len(rows)} {noun}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
