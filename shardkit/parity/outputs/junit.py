"""What was found, as JUnit XML: a test case for each strategy, for the servers that run CI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from shardkit.parity._results import Comparison, Measured, Report, Row, Side
from shardkit.parity.outputs import _words


class _Case(NamedTuple):
    """One test case; ``outcome`` is ``""`` (it passed), ``"failure"``, ``"error"`` or ``"skipped"``."""

    name: str
    outcome: str = ""
    type: str = ""
    message: str = ""
    details: str = ""
    output: str = ""
    seconds: float = 0.0


def as_junit(found: Comparison | Report) -> str:
    """Return an XML document: a suite for each environment, with its versions, and one of all strategies.

    A strategy that differs or has no parity is a failure; what could not run, or was refused by a suite, an error; what
    could not be judged, or is refused before and after an upgrade alike, is skipped. A case's time is that of its
    steps: all runs', on both sides. Numbers are in its output.
    """
    root = Element("testsuites", name="shardkit parity")
    if isinstance(found, Comparison):
        properties = {"a": found.a, "b": found.b} | _difference_properties(found)
        _suite(root, "shardkit parity compare", properties, [_compared(found)])
    else:
        names = _words.names_of(found)
        for name, side in zip(names, found.sides, strict=False):
            properties = {f"wanted.{package}": held for package, held in side.wanted.items()}
            properties |= {f"version.{package}": held for package, held in side.versions.items()}
            cases = [_environment(side)]
            if side.baseline is not None:
                cases.append(_baseline(side.baseline, found))
            _suite(root, f"environment {name}", properties, cases)
        properties = {key: _words.value(held) for key, held in found.settings.items()}
        properties |= {"summary": found.summary, "exit_code": str(found.exit_code)}
        for name, side in zip(names, found.sides, strict=False):
            properties |= {f"{name}: {package}": held for package, held in side.versions.items()}
        _suite(root, f"shardkit parity {found.kind}", properties, [_strategy(row, found) for row in found.rows])
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", _seconds(sum(float(suite.get("time", "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, name: str, properties: Mapping[str, str], cases: list[_Case]) -> None:
    amounts = {
        "tests": len(cases),
        "failures": sum(case.outcome == "failure" for case in cases),
        "errors": sum(case.outcome == "error" for case in cases),
        "skipped": sum(case.outcome == "skipped" for case in cases),
    }
    suite = SubElement(root, "testsuite", name=name)
    for key, amount in amounts.items():
        suite.set(key, str(amount))
    suite.set("time", _seconds(sum(case.seconds for case in cases)))
    held = SubElement(suite, "properties")
    for key, text in properties.items():
        SubElement(held, "property", name=_words.line(key), value=_words.line(text))
    for case in cases:
        made = SubElement(suite, "testcase", classname=name, name=case.name, time=_seconds(case.seconds))
        if case.outcome:
            told = SubElement(made, case.outcome, message=_words.line(case.message))
            if case.type:
                told.set("type", case.type)
            told.text = _words.printed(case.details) or None
        if case.output:
            SubElement(made, "system-out").text = _words.printed(case.output)


def _seconds(amount: float) -> str:
    return format(amount if math.isfinite(amount) else 0.0, ".3f")


def _difference_properties(found: Comparison) -> dict[str, str]:
    told = {}
    for item in _words.ordered(found.differences):
        a, b = _words.sides_of(item)
        told[f"differs.{item.kind}.{item.what}"] = f"{a} | {b}"
    return told


def _compared(found: Comparison) -> _Case:
    name = _words.title(found)
    details = account(found)
    verdict = _words.verdict(found)
    if found.exit_code == 0:
        return _Case(name, output=f"{verdict}\n{details}")
    outcome = "failure" if found.exit_code == 1 else "error"
    return _Case(name, outcome, found.verdict, verdict, details)


def _environment(side: Side) -> _Case:
    notes = "\n".join(side.notes)
    if side.failure is None:
        return _Case("environment", output=notes)
    return _Case("environment", "error", side.failure.stage, side.failure.headline, side.failure.details, notes)


def _baseline(measured: Measured, found: Report) -> _Case:
    name = "baseline"
    if measured.failure is not None:
        return _Case(name, "error", measured.failure.stage, measured.failure.headline, measured.failure.details)
    return _Case(name, output=_numbers(name, measured), seconds=_took([measured], found))


def _strategy(row: Row, found: Report) -> _Case:
    name = _words.strategy(row)
    held = [measured for measured in (row.before, row.after) if measured is not None]
    failures = [measured.failure for measured in held if measured.failure is not None]
    sides = _words.names_of(found)
    told = [_numbers(side, measured) for side, measured in zip(sides, held, strict=False)]
    if row.speed_ratio is not None:
        told.append(f"speed, after over before: {_words.times(row.speed_ratio, row.speed_spread)}")
    if row.memory_ratio is not None:
        told.append(f"peak memory, after over before: {_words.times(row.memory_ratio)}")
    for item in row.changed:
        before, after = _words.sides_of(item)
        told.append(f"default changed: {_words.line(item.what)} was {before}, is {after}")
    if row.comparison is not None:
        told.append(account(row.comparison, ("before", "after") if row.after is not None else ("a", "b")))
    output, seconds = "\n".join(told), _took(held, found)
    message = row.reason or row.verdict
    if row.verdict in ("same", "round-off", "parity"):
        return _Case(name, output=f"{row.verdict}: {row.reason}\n{output}", seconds=seconds)
    if row.verdict == "unjudged" or (row.verdict == "refused" and found.kind == "upgrade"):
        details = "\n".join(failure.details or failure.headline for failure in failures)
        return _Case(name, "skipped", row.verdict, f"{row.verdict}: {message}", details, output, seconds)
    if row.verdict in ("could not run", "refused"):
        details = "\n\n".join(f"{failure.headline}\n{failure.details}" for failure in failures)
        stage = failures[0].stage if failures else "error"
        return _Case(name, "error", stage, message, details, output, seconds)
    return _Case(name, "failure", row.verdict, message, output, seconds=seconds)


def account(found: Comparison, names: tuple[str, str] = ("a", "b")) -> str:
    """Return where two runs part and why, in lines."""
    lines = [*_words.partings(found, names), _words.ends(found)]
    for diagnosis in found.diagnoses:
        lines.append(f"{diagnosis.name} ({diagnosis.confidence}): {_words.line(diagnosis.sentence)}")
        lines.append(f"    {_words.evidence(diagnosis)}" if diagnosis.evidence else "")
    return "\n".join(told for told in lines if told)


def _numbers(side: str, measured: Measured) -> str:
    if measured.failure is not None:
        return f"{side}: {measured.failure.stage}: {_words.line(measured.failure.headline)}"
    told = [f"{measured.runs} runs, repeatable {_words.repeatable(measured)}"]
    if measured.distances is not None:
        own = measured.distances
        told.append(
            f"distance from float64: loss {_words.gap(own.loss)}, gradient norm {_words.gap(own.gradient_norm)}, "
            f"weights {_words.gap(own.weights)}, {_words.ulps(own.loss_ulps)} ULPs of a loss"
        )
    if measured.samples_per_second is not None:
        told.append(f"{measured.samples_per_second:.1f} samples/s")
    if measured.peak_memory:
        told.append(f"peak {_words.number(_words.mebibytes(measured), '.1f')} MiB per rank")
    return f"{side}: {'; '.join(told)}"


def _took(held: list[Measured], found: Report) -> float:
    steps = found.settings.get("steps")
    amount = steps if isinstance(steps, int) else 1
    return sum(amount * sum(measured.step_seconds) for measured in held)
