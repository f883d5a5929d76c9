"""Numbers, names and findings in words, the same in every output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkit.parity._results import Comparison, Diagnosis, Difference, Failure, Measured, Parting, Report, Row, Side

LEGEND = {
    "distance": "how far losses, gradient norms or what training moved of the weights lie from the same work in "
    "float64, relative to it; the largest over the steps.",
    "baseline": "plain data-parallel training of torch on the same work; its own distance is what the others' are "
    "held to: x2 is twice as far.",
    "gap": "how far two runs lie apart, relative to the first of them.",
    "ULP": "unit in the last place, the spacing of float32 numbers: 1 is the least by which two of them can differ.",
    "round-off": "what another order of the same additions changes; no fault.",
    "repeatable": "fresh processes give the same, to the last bit.",
    "control": "the library driven by itself, without shardkit's plugin: what differs there too, the library changed.",
    "speed": "samples per second, after over before; ± is how far two equal runs would go, from the repeats' spread.",
}
"""One line for each word that a reader may not know."""

STAGES = {
    "install": "did not install",
    "import": "does not import",
    "refused": "was refused",
    "error": "failed",
    "crash": "died",
    "timeout": "did not end in time",
}

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_MOST_TEXT = 200_000
NO_CAUSE = "None of the known causes explains the numbers; where they part, and how that grows, is below."

_KINDS = (
    "model",
    "length",
    "data",
    "start",
    "seed",
    "strategy",
    "optimizer",
    "world size",
    "configuration",
    "version",
    "environment",
    "device",
)


def clean(text: object) -> str:
    """Return text without colours of a terminal, and with what XML can't hold spelled out."""
    plain = _ANSI.sub("", str(text)).replace("\r\n", "\n").replace("\r", "\n")
    return _ILLEGAL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), plain)


def line(text: object) -> str:
    """Return cleaned text on one line."""
    return " ".join(clean(text).split())


def printed(text: str) -> str:
    """Return what a process printed, cleaned; of very much the beginning and the end."""
    found = clean(text)
    if len(found) <= _MOST_TEXT:
        return found
    half = _MOST_TEXT // 2
    return f"{found[:half]}\n[... {len(found) - 2 * half} characters left out ...]\n{found[-half:]}"


def value(held: Any, most: int | None = None) -> str:
    """Return a setting's value as JSON on one line, of ``most`` characters."""
    try:
        text = line(json.dumps(held, ensure_ascii=False, default=str))
    except (TypeError, ValueError):
        text = line(held)
    return text if most is None or len(text) <= most else f"{text[: most - 3]}..."


def loss(number: float | None) -> str:
    """Return a loss with all digits that float32 has."""
    return "-" if number is None else format(number, ".9g")


def gap(number: float | None) -> str:
    """Return a relative difference for a table."""
    if number is None:
        return "-"
    return "0" if number == 0 else format(number, ".1e")


def share(number: float) -> str:
    """Return a relative difference for a sentence."""
    return f"{100 * number:.3g} %" if 1e-3 <= number < 10 else f"a relative {number:.2g}"


def ulps(number: float | None) -> str:
    if number is None:
        return "-"
    return format(number, ".0f") if number == round(number, 1) or number >= 100 else format(number, ".1f")


def times(ratio: float | None, spread: float | None = None) -> str:
    """Return a ratio such as ``x1.02 ± 3 %``."""
    if ratio is None or math.isnan(ratio):
        return "-"
    shown = f"x{ratio:.2f}" if abs(ratio) < 100 else f"x{ratio:.0f}" if abs(ratio) < 1e6 else f"x{ratio:.1e}"
    return shown if spread is None else f"{shown} ± {100 * spread:.2g} %"


def ratio(own: float | None, base: float | None) -> float | None:
    """Return how many times as far something is as the baseline; None where one of them isn't known."""
    if own is None or base is None:
        return None
    if base == 0:
        return 1.0 if own == 0 else math.inf
    return own / base


def mebibytes(measured: Measured | None) -> float | None:
    """Return the peak memory of the rank that took most, in MiB."""
    return max(measured.peak_memory) / 2**20 if measured is not None and measured.peak_memory else None


def number(found: float | None, form: str) -> str:
    return "-" if found is None else format(found, form)


def strategy(row: Row) -> str:
    return f"{line(row.strategy)} (control)" if row.control else line(row.strategy)


def packed(text: str, width: int) -> str:
    """Return a strategy on lines of about ``width`` characters, which end with a comma or a space."""
    lines = [""]
    for part in re.findall(r"[^, ]*[, ]?", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(shown.strip() for shown in lines)


def final_loss(measured: Measured | None, losses: list[float] | None) -> float | None:
    """Return the last loss of a run: of its comparison's losses, else of its trace."""
    if losses:
        return losses[-1]
    curve = losses_of(measured)
    return curve[-1] if curve else None


def losses_of(measured: Measured | None) -> list[float]:
    return [] if measured is None or measured.trace is None else measured.trace.loss.tolist()


def title(found: Comparison | Report) -> str:
    """Return what is compared, in one line."""
    if isinstance(found, Comparison):
        return f"{line(found.a)} against {line(found.b)}"
    work = line(found.settings.get("target", "")) or "a workload"
    if found.kind == "upgrade":
        names = [environment(side) for side in found.sides]
        return f"{work} on {' against '.join(names)}" if names else work
    return f"strategies side by side on {work}"


def environment(side: Side) -> str:
    """Return what a side is: the versions that were asked for, where there are any."""
    asked = ", ".join(f"{line(name)} {line(version)}" for name, version in side.wanted.items())
    return asked or line(side.name)


def settings(found: Report) -> str:
    """Return what else was settled, in one line."""
    kept = {name: held for name, held in found.settings.items() if name != "target" and held is not None}
    return ", ".join(f"{line(name).replace('_', ' ')} {_bare(held)}" for name, held in kept.items())


def _bare(held: Any) -> str:
    return line(held) if isinstance(held, str) else value(held, 80)


def verdict(found: Comparison) -> str:
    """Return what came of a comparison, in one line."""
    lengths = len(found.loss_a), len(found.loss_b)
    steps = count(min(lengths), "step")
    if lengths[0] != lengths[1]:
        steps = f"the {steps} that both have, of {lengths[0]} in a and {lengths[1]} in b"
    if found.verdict == "identical":
        return f"identical: every recorded bit is the same, over {steps}"
    if found.verdict == "round-off":
        return f"round-off: over {steps} they differ by no more than the order of additions does"
    if found.verdict == "incomparable":
        causes = [item for item in ordered(found.differences) if item.kind in ("model", "length")]
        why = f": the {causes[0].kind} differs in {line(causes[0].what)}" if causes else ""
        return f"incomparable: these runs can't be held against each other{why}"
    if found.parting is None:
        return f"different: they differ by more than round-off, over {steps}"
    return f"different: they part {_when(found.parting)}, in {_what(found.parting)}"


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def partings(found: Comparison, names: tuple[str, str] = ("a", "b")) -> list[str]:
    """Return where the first bit differs, and where the runs part beyond round-off, as sentences."""
    first, parting = found.first_bit, found.parting
    if found.verdict == "incomparable" and first is None and parting is None:
        return []
    if first is None and parting is None:
        return ["No bit differs."] if found.verdict == "identical" else []
    told = []
    if first is not None:
        before = f"All is the same up to step {first.step - 1}. " if first.step > 1 else ""
        told.append(
            f"{before}The first bit that differs is seen {_when(first)}: {_what(first)}{_values(first, names)}."
        )
    if parting is None:
        told.append("They never part by more than round-off.")
    elif parting == first:
        told.append("That is already more than round-off.")
    else:
        told.append(f"Beyond round-off they part {_when(parting)}: {_what(parting)}{_values(parting, names)}.")
    return told


def _when(parting: Parting) -> str:
    if parting.quantity == "weights before the first step":
        return "before the first step"
    return f"in step {parting.step}"


def _what(parting: Parting) -> str:
    weights = parting.quantity in ("weight", "weights before the first step")
    quantity = "weights" if weights else parting.quantity
    name = {"applied": "whether the step moved the weights", "data": "the batch"}.get(quantity, f"the {quantity}")
    where = f" of {line(parting.parameter)}" if parting.parameter else ""
    return name + where + (f" on rank {parting.rank}" if parting.rank is not None else "")


def _values(parting: Parting, names: tuple[str, str]) -> str:
    a, b = names
    if parting.quantity == "applied" and parting.a is not None and parting.b is not None:
        return f", {'yes' if parting.a else 'no'} {_in(a)} and {'yes' if parting.b else 'no'} {_in(b)}"
    if parting.quantity == "data":
        return ""
    told = ""
    if parting.a is not None and parting.b is not None:
        norm = "of L2 norm " if parting.quantity in ("gradient", "weight", "weights before the first step") else ""
        told = f", {norm}{loss(parting.a)} {_in(a)} and {loss(parting.b)} {_in(b)}"
    if math.isfinite(parting.relative):
        told += f", {share(parting.relative)} apart"
        told += f", the most of {parting.count} parameters" if parting.count > 1 else ""
    return told + (f", {count_ulps(parting.ulps)}" if parting.ulps is not None and math.isfinite(parting.ulps) else "")


def _in(name: str) -> str:
    return name if name in ("before", "after") else f"in {name}"


def count_ulps(amount: float) -> str:
    return f"{ulps(amount)} ULP" if amount == 1 else f"{ulps(amount)} ULPs"


def ends(found: Comparison) -> str:
    """Return how far apart the weights are at the end, as a sentence; nothing where it isn't known."""
    if found.final_weights is None:
        return ""
    most = f"; no single one by more than {count_ulps(found.final_ulps)} of its tensor" if found.final_ulps else ""
    if not math.isfinite(found.final_weights):
        return "At the end the weights aren't finite."
    if found.final_weights == 0:
        return "At the end the weights are the same."
    return f"At the end the weights are {share(found.final_weights)} apart{most}."


def ordered(differences: list[Difference]) -> list[Difference]:
    """Return differences, what makes runs incomparable first."""
    places = {kind: place for place, kind in enumerate(_KINDS)}
    return sorted(differences, key=lambda item: places.get(item.kind, len(places)))


def sides_of(difference: Difference, most: int | None = None) -> tuple[str, str]:
    """Return a difference's two values as text; of one that says all in its name, nothing."""
    if difference.a is None and difference.b is None and not difference.missing:
        return "", ""
    a = "(absent)" if difference.missing == "a" else value(difference.a, most)
    b = "(absent)" if difference.missing == "b" else value(difference.b, most)
    return a, b


def evidence(diagnosis: Diagnosis) -> str:
    """Return the numbers that bear a diagnosis out, in one line."""
    return ", ".join(f"{line(name).replace('_', ' ')} {_figure(held)}" for name, held in diagnosis.evidence.items())


def _figure(held: Any) -> str:
    return format(held, ".6g") if isinstance(held, float) else _bare(held)


def diagnoses(found: Report) -> Iterator[tuple[str, Diagnosis]]:
    """Yield each diagnosis with the strategy that it is of; what a run's repeats say of it included."""
    for row in found.rows:
        held = [row.comparison]
        held += [measured.self_comparison for measured in (row.before, row.after) if measured is not None]
        seen: list[Diagnosis] = []
        for comparison in held:
            for diagnosis in comparison.diagnoses if comparison is not None else []:
                if diagnosis not in seen:
                    seen.append(diagnosis)
                    yield strategy(row), diagnosis


class Failed(NamedTuple):
    """A failure, what it is of, and of which environment if there are several."""

    what: str
    side: str
    failure: Failure

    def __str__(self) -> str:
        stage = STAGES.get(self.failure.stage, self.failure.stage)
        side = f" ({self.side})" if self.side else ""
        return f"{self.what}{side} {stage}: {line(self.failure.headline)}"


def failures(found: Report) -> list[Failed]:
    """Return all that failed: environments, baselines, strategies. What is refused is none of it."""
    failed = []
    names = names_of(found) if found.kind == "upgrade" else [""]
    for name, side in zip(names, found.sides, strict=False):
        if side.failure is not None:
            failed.append(Failed("the environment", name, side.failure))
        if side.baseline is not None and side.baseline.failure is not None:
            failed.append(Failed("the baseline", name, side.baseline.failure))
    for row in found.rows:
        if row.verdict == "refused":
            continue
        for name, measured in zip(names, (row.before, row.after), strict=False):
            if measured is not None and measured.failure is not None:
                failed.append(Failed(strategy(row), name, measured.failure))
    return failed


def names_of(found: Report) -> list[str]:
    """Return the names of the sides, of two at least; those of an environment against itself are told apart."""
    names = [environment(side) for side in found.sides] + ["before", "after"][len(found.sides) :]
    return [f"{names[0]} (before)", f"{names[1]} (after)"] if len(names) == 2 and names[0] == names[1] else names


def repeatable(measured: Measured | None) -> str:
    """Return whether the runs agree; unknown of a single run."""
    if measured is None or measured.failure is not None or measured.repeatable is None:
        return "-"
    return "yes" if measured.repeatable else "NO"


def reasoned(row: Row) -> bool:
    """Return whether a row's reason says what neither its numbers nor its failure do."""
    plain = row.verdict == "parity" and row.before.repeatable is not False
    return bool(row.reason) and not plain and (row.before.failure is None or row.verdict == "refused")


def changed(found: Report) -> list[tuple[Difference, list[str]]]:
    """Return each setting that changed once, with the strategies whose it is."""
    gathered: dict[str, tuple[Difference, list[str]]] = {}
    for row in found.rows:
        for item in row.changed:
            key = f"{item.what}\0{sides_of(item)}"
            gathered.setdefault(key, (item, []))[1].append(strategy(row))
    return list(gathered.values())
