"""From where two runs part to why: each cause looks for itself, and what explains most comes first."""

from __future__ import annotations

from shardkit.parity import _causes_gradient, _causes_ranks, _causes_run, _causes_update
from shardkit.parity._case import Case
from shardkit.parity._results import Diagnosis

_CAUSES = (
    _causes_run.races,
    _causes_run.data,
    _causes_run.start,
    _causes_run.skips,
    _causes_run.schedules,
    _causes_ranks.local_gradients,
    _causes_ranks.unused,
    _causes_ranks.stale,
    _causes_gradient.low_precision,
    _causes_gradient.scales,
    _causes_update.updates,
)

_OF_LOSSES = (_causes_run.races, _causes_run.data, _causes_run.start, _causes_run.skips, _causes_run.schedules)
"""Those that need nothing of single parameters."""

NAMES = (
    "accumulation",
    "clipping acted",
    "clipping did not act",
    "configuration",
    "data",
    "decay on unused parameters",
    "gradient scale",
    "learning rate",
    "local gradient",
    "loss scale",
    "lower precision",
    "optimizer mode",
    "race",
    "schedule ran ahead",
    "stale parameter",
    "start weights",
    "step skipped",
    "sum instead of mean",
    "world size",
)
"""All names that a diagnosis has."""


def diagnose(case: Case) -> list[Diagnosis]:
    """Return what the numbers say of the cause, the best first; nothing of runs that part by round-off alone."""
    if case.parting is None:
        return list(_causes_run.races(case))
    found: dict[str, Diagnosis] = {}
    for cause in _CAUSES if case.pair.detailed else _OF_LOSSES:
        for diagnosis in cause(case):
            if not any(_same_factor(diagnosis, other) for other in found.values()):
                found.setdefault(diagnosis.name, diagnosis)
    if not found:
        found = {diagnosis.name: diagnosis for diagnosis in _causes_run.settings(case)}
    return list(found.values())


def _same_factor(one: Diagnosis, other: Diagnosis) -> bool:
    """Return whether two are readings of one factor, each of which names the other."""
    factors = one.evidence.get("factor"), other.evidence.get("factor")
    return factors[0] is not None and factors[0] == factors[1]
