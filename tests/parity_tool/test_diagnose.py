"""Each cause that the comparison names is planted in a real run, and has to be named first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardkit.parity import Trace, compare
from shardkit.parity._diagnose import NAMES
from shardkit.parity._results import Comparison, Diagnosis

from .conftest import Load
from .planted import FAULTS, STRATEGIES, kinds

PLANTED = [(plain, name, cause) for plain, faults in FAULTS.items() for name, _, cause in faults]


def named(comparison: Comparison) -> list[str]:
    return [diagnosis.name for diagnosis in comparison.diagnoses]


def first(comparison: Comparison) -> Diagnosis:
    return comparison.diagnoses[0]


@pytest.mark.parametrize(("plain", "name", "cause"), PLANTED, ids=[f"{plain}-{name}" for plain, name, _ in PLANTED])
def test_a_planted_fault_is_named_first(trace: Load, plain: str, name: str, cause: str) -> None:
    found = compare(trace(plain), trace(name))
    assert found.verdict == "different"
    assert named(found)[:1] == [cause], found.diagnoses
    assert set(named(found)) <= set(NAMES)


BACKWARDS = {"clipping acted": "clipping did not act"}
"""What a fault is called from the other run's side, where that is something else: if the settings tell of it."""


@pytest.mark.parametrize(("plain", "name", "cause"), PLANTED, ids=[f"{plain}-{name}" for plain, name, _ in PLANTED])
def test_it_is_named_too_where_the_first_run_has_it(trace: Load, plain: str, name: str, cause: str) -> None:
    wanted = BACKWARDS.get(cause, cause) if name == "told to clip" else cause
    assert named(compare(trace(name), trace(plain)))[:1] == [wanted]


@pytest.mark.parametrize(
    ("plain", "name", "cause"),
    [item for item in PLANTED if item[0] in ("sgd", "momentum", "adamw") and item[1] != "times W M"],
    ids=[
        f"{plain}-{name}" for plain, name, _ in PLANTED if plain in ("sgd", "momentum", "adamw") and name != "times W M"
    ],
)
def test_it_is_named_too_against_a_run_that_differs_by_round_off(
    trace: Load, plain: str, name: str, cause: str
) -> None:
    assert named(compare(trace(f"one process, {plain}"), trace(name)))[:1] == [cause]


def test_all_names_but_that_of_a_race_are_planted() -> None:
    assert {cause for *_, cause in PLANTED} == {*NAMES} - {"race"}


@pytest.mark.parametrize(("under", "kind"), [(name, kind) for name in STRATEGIES for kind in kinds(name)])
def test_round_off_has_no_diagnosis(trace: Load, under: str, kind: str) -> None:
    found = compare(trace(f"one process, {kind}"), trace(f"{under}, {kind}"))
    assert found.verdict == "round-off"
    assert found.parting is None
    assert found.diagnoses == []


def test_weights_that_move_by_noise_alone_are_round_off(trace: Load) -> None:
    one, two = trace("one process, attention"), trace("attention")
    found = compare(one, two)
    key = one.parameters.index("key.bias")
    # It is all noise: a step of Adam makes as much of it as of any gradient.
    assert found.gaps is not None
    assert max(found.gaps.parameter_gradients[key]) > 0.1
    assert (found.verdict, found.diagnoses) == ("round-off", [])


def test_round_off_of_low_precision_is_round_off_too(trace: Load) -> None:
    found = compare(trace("one process, bf16"), trace("fairscale bf16"))
    assert found.gaps is not None
    assert max(found.gaps.gradients) > 1e-3
    assert (found.verdict, found.diagnoses) == ("round-off", [])


def test_a_fault_that_begins_late_is_found_where_it_begins(trace: Load) -> None:
    found = compare(trace("one process, sgd"), trace("times W from step 4"))
    assert found.first_bit is not None
    assert found.first_bit.step == 1
    assert found.parting is not None
    assert (found.parting.step, found.parting.quantity) == (4, "gradient")
    assert named(found) == ["world size"]


def test_a_factor_that_is_world_size_and_accumulation_alike_is_said_to_be_either(trace: Load) -> None:
    found = compare(trace("two micro-batches"), trace("two micro-batches, times W"))
    assert named(found) == ["world size"]
    assert "the number of micro-batches" in found.diagnoses[0].sentence
    assert found.diagnoses[0].confidence == "likely"


def test_a_factor_of_some_parameters_names_them(trace: Load) -> None:
    found = first(compare(trace("sgd"), trace("inner times W")))
    assert "inner.weight, inner.bias" in found.sentence
    assert found.evidence["parameters"] == 2


@pytest.mark.parametrize(
    ("name", "factor"), [("times W", 2.0), ("over sqrt W", 2**-0.5), ("times M", 3.0), ("times 1.7", 1.7)]
)
def test_the_factor_is_told(trace: Load, name: str, factor: float) -> None:
    found = first(compare(trace("sgd"), trace(name)))
    assert found.evidence["factor"] == pytest.approx(factor, rel=1e-5)
    assert found.confidence == "certain"


def test_the_limit_of_a_clip_that_nobody_told_of_is_found(trace: Load) -> None:
    assert first(compare(trace("sgd"), trace("clips"))).evidence["max_norm"] == pytest.approx(0.05, rel=1e-3)
    # Adam sees no constant factor, but where its eps does: the limit is found to some tenths.
    assert first(compare(trace("adamw"), trace("adamw clips"))).evidence["max_norm about"] == pytest.approx(
        0.05, rel=0.2
    )


def test_the_setting_of_a_clip_is_told(trace: Load) -> None:
    evidence = first(compare(trace("sgd"), trace("told to clip"))).evidence
    assert evidence["settings"] == {"max_grad_norm": [None, 0.5]}
    configured = with_facts(trace("clips"), configuration={"Wrapped.gradient_clipping": 0.05})
    plain = with_facts(trace("sgd"), configuration={"Wrapped.gradient_clipping": 0.0})
    found = first(compare(plain, configured))
    assert found.evidence["settings"] == {"Wrapped.gradient_clipping": [0.0, 0.05]}


@pytest.mark.parametrize(
    ("name", "setting"),
    [("other betas", {"betas": (0.9, 0.95)}), ("other eps", {"eps": 1e-3}), ("no decay", {"weight_decay": 0.0})],
)
def test_the_setting_that_was_truly_used_is_told(trace: Load, name: str, setting: dict[str, Any]) -> None:
    found = first(compare(trace("adamw"), trace(name)))
    assert found.evidence.items() >= setting.items()
    assert found.evidence["run"] == "b"


def test_a_schedule_tells_why_it_ran_ahead(trace: Load) -> None:
    assert "once per process" in first(compare(trace("sgd"), trace("schedule per process"))).sentence
    assert "once per micro-batch" in first(compare(trace("sgd"), trace("schedule per micro-batch"))).sentence
    assert first(compare(trace("sgd"), trace("schedule a step on"))).evidence == {"shift": 1}


def test_ranks_and_parameters_are_told(trace: Load) -> None:
    stale = first(compare(trace("sgd"), trace("stale on rank 1"))).evidence
    assert (stale["parameters"], stale["ranks"]) == (["inner.weight"], [1])
    local = first(compare(trace("sgd"), trace("local"))).evidence
    assert (local["parameters"], local["ranks"]) == (["inner.weight"], [0, 1])


def test_lower_precision_that_is_told_is_certain(trace: Load) -> None:
    found = compare(trace("ddp"), trace("ddp bf16"))
    assert named(found) == ["lower precision"]
    assert first(found).confidence == "certain"


def test_a_race_is_named_and_only_what_is_beyond_it_counts(trace: Load) -> None:
    a, again, once_more = trace("race"), trace("race again"), trace("race once more")
    found = compare(a, once_more, again=again)
    assert (found.verdict, named(found)) == ("round-off", ["race"])
    assert first(found).evidence["parameter"] == "inner.weight"
    assert first(found).evidence["step"] == 2
    assert compare(a, once_more).verdict == "different"
    beyond = compare(a, trace("times W"), again=again)
    assert beyond.verdict == "different"
    assert named(beyond) == ["race", "world size"]


def test_a_run_that_repeats_itself_has_no_race(trace: Load) -> None:
    assert compare(trace("sgd"), trace("ddp"), again=trace("sgd again")).diagnoses == []


def test_a_setting_that_differs_is_named_with_both_values(trace: Load) -> None:
    found = first(compare(trace("sgd"), trace("masked")))
    assert found.evidence == {"track_grad_norm": {"a": False, "b": True}}
    assert found.confidence == "likely"


def test_what_no_number_explains_has_no_diagnosis(trace: Load) -> None:
    masked = replace(trace("masked"), facts=trace("sgd").facts)
    found = compare(trace("sgd"), masked)
    assert (found.verdict, found.diagnoses) == ("different", [])


def test_an_optimizer_that_is_not_known_is_not_judged(trace: Load) -> None:
    facts = {
        **trace("adamw").facts,
        "optimizer": {**trace("adamw").facts["optimizer"], "class": "Own", "module": "own"},
    }
    found = compare(replace(trace("adamw"), facts=facts), replace(trace("L2 decay"), facts=facts))
    assert (found.verdict, found.diagnoses) == ("different", [])


def test_a_gradient_that_is_not_a_number_is_told_as_it_is(trace: Load) -> None:
    gradients = trace("skips").gradients.clone()
    gradients[2] = torch.nan
    found = compare(trace("sgd"), replace(trace("skips"), gradients=gradients))
    assert named(found)[:1] == ["step skipped"]
    assert "not finite" in first(found).sentence


def with_facts(trace: Trace, **facts: Any) -> Trace:
    return replace(trace, facts={**trace.facts, **facts})
