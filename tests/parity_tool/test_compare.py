"""What a comparison says of two runs: whether they may be compared, where they part, and how far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardkit.errors import InputError
from shardkit.parity import Trace, compare
from shardkit.parity._results import Comparison, Difference
from shardkit.parity._sketch import ABSENT, SQUARE
from shardkit.parity.outputs._words import verdict

from .conftest import Load
from .planted import STRATEGIES, kinds


def told(comparison: Comparison, kind: str) -> list[Difference]:
    return [difference for difference in comparison.differences if difference.kind == kind]


def with_facts(trace: Trace, **facts: Any) -> Trace:
    return replace(trace, facts={**trace.facts, **facts})


def test_two_runs_of_the_same_are_identical(trace: Load) -> None:
    found = compare(trace("sgd"), trace("sgd again"))
    assert (found.verdict, found.exit_code) == ("identical", 0)
    assert found.differences == []
    assert (found.first_bit, found.parting, found.diagnoses) == (None, None, [])
    assert (found.final_weights, found.final_ulps) == (0.0, 0.0)
    assert found.gaps is not None
    assert found.gaps.loss == [0.0] * 6
    assert found.loss_a == found.loss_b == trace("sgd").loss.tolist()


@pytest.mark.parametrize(("under", "kind"), [(name, kind) for name in STRATEGIES for kind in kinds(name)])
def test_every_strategy_agrees_with_one_process(trace: Load, under: str, kind: str) -> None:
    one, two = trace(f"one process, {kind}"), trace(f"{under}, {kind}")
    found = compare(one, two)
    assert (found.verdict, found.parting) == ("round-off", None)
    assert found.gaps is not None
    assert max(found.gaps.loss) < 2e-6
    assert max(found.gaps.gradients) < 2e-6
    assert max(found.gaps.weights) < 2e-6
    assert found.final_weights is not None
    assert found.final_weights < 1e-6
    # The same samples, cut into 6 micro-batches in one process and into 3 on each of two ranks.
    assert one.data.equal(two.data)
    assert told(found, "data") == []


def test_the_global_batch_has_the_same_fingerprint_however_it_is_cut(trace: Load) -> None:
    assert trace("two micro-batches").batches.shape == (6, 2, 2)
    assert trace("sgd").batches.shape == (6, 2, 3)
    assert trace("two micro-batches").data.equal(trace("sgd").data)
    assert len(trace("sgd").data.unique()) == 6


def test_round_off_is_where_the_first_bit_differs(trace: Load) -> None:
    found = compare(trace("one process, sgd"), trace("sgd"))
    assert found.first_bit is not None
    assert (found.first_bit.step, found.first_bit.quantity) == (1, "gradient")
    assert found.first_bit.relative < 1e-6
    assert [(item.a, item.b) for item in told(found, "world size")] == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "step", "quantity", "parameter", "rank"),
    [
        ("other data", 3, "data", "", None),
        ("another start", 1, "weights before the first step", None, None),
        ("sum over samples", 1, "loss", "", None),
        ("times W", 1, "gradient", None, None),
        ("inner times W", 1, "gradient", "inner", None),
        ("local", 1, "gradient", "inner.weight", 1),
        ("schedule per process", 2, "learning rate", "group 1", None),
        ("skips", 3, "applied", "", None),
        ("stale", 1, "weight", "inner.weight", None),
        ("stale on rank 1", 1, "weight", "inner.weight", 1),
    ],
)
def test_runs_part_where_the_fault_is(
    trace: Load, name: str, step: int, quantity: str, parameter: str | None, rank: int | None
) -> None:
    found = compare(trace("sgd"), trace(name))
    assert (found.verdict, found.exit_code) == ("different", 1)
    parting = found.parting
    assert parting is not None
    assert (parting.step, parting.quantity) == (step, quantity)
    if parameter is not None:
        assert parting.parameter.startswith(parameter)
    if rank is not None:
        assert parting.rank == rank


def test_a_parting_tells_values_and_how_many(trace: Load) -> None:
    a, b = trace("sgd"), trace("inner times W")
    parting = compare(a, b).parting
    assert parting is not None
    place = a.parameters.index(parting.parameter)
    assert parting.a == pytest.approx(float(a.gradient_norms[0, 0, place]))
    assert parting.b == pytest.approx(2 * parting.a)
    assert parting.relative == pytest.approx(1.0)
    assert parting.count == 2
    assert parting.ulps is None
    loss = compare(a, trace("sum over samples")).parting
    assert loss is not None
    assert (loss.a, loss.b) == (float(a.loss[0]), float(trace("sum over samples").loss[0]))
    # Of 8.76 and 35.05: the numbers of float32 are 2**-18 apart there.
    assert loss.ulps == pytest.approx((35.0548791885376 - 8.7637197971344) * 2**18, rel=1e-6)


def test_gaps_are_those_of_the_whole_gradients_and_weights(trace: Load) -> None:
    a, b = trace("sgd"), trace("times 1.7")
    gaps = compare(a, b).gaps
    assert gaps is not None
    assert gaps.names == a.parameters
    assert len(gaps.loss) == len(gaps.gradients) == len(gaps.weights) == 6
    assert [len(row) for row in gaps.parameter_gradients] == [6] * 10
    # The norm of a difference is estimated from sketches, of all parameters to some tenths.
    assert gaps.gradient_norm[0] == pytest.approx(0.7)
    assert gaps.gradients[0] == pytest.approx(0.7, rel=0.3)
    assert gaps.loss[1] == pytest.approx(abs(float(b.loss[1] / a.loss[1]) - 1))
    absent = a.parameters.index("unused.weight")
    assert gaps.parameter_gradients[absent] == [0.0] * 6
    assert gaps.parameter_weights[absent] == [0.0] * 6


def test_the_weights_at_the_end_are_compared_whole(trace: Load) -> None:
    a, b = trace("sgd"), trace("stale")
    names = list(a.final_weights)
    apart = sum(
        float((a.final_weights[name].double() - b.final_weights[name].double()).square().sum()) for name in names
    )
    size = sum(float(a.final_weights[name].double().square().sum()) for name in names)
    found = compare(a, b)
    assert found.final_weights == pytest.approx((apart / size) ** 0.5)
    moved = {**a.final_weights, "inner.bias": a.final_weights["inner.bias"].clone()}
    largest = float(moved["inner.bias"].abs().max())
    unit = 2.0 ** (torch.tensor(largest).log2().floor().item() - 23)
    moved["inner.bias"][0] += 3 * unit
    found = compare(a, replace(a, final_weights=moved))
    assert found.final_ulps == pytest.approx(3.0, abs=0.5)
    # What no step showed shows at the end.
    assert found.verdict == "round-off"
    assert compare(a, replace(a, final_weights={})).final_weights is None


def test_models_that_differ_are_not_compared(trace: Load) -> None:
    found = compare(trace("sgd"), trace("another model"))
    assert (found.verdict, found.exit_code) == ("incomparable", 2)
    assert found.gaps is None
    assert found.differences[0] == Difference("model", "outer.weight", [16, 12], [20, 12])
    assert found.differences[-1].what == "and 4 more parameters"
    parameters = {name: held for name, held in trace("sgd").facts["parameters"].items() if name != "head.bias"}
    found = compare(trace("sgd"), with_facts(trace("sgd"), parameters=parameters))
    assert found.differences == [Difference("model", "head.bias", [1], None, "b")]


def test_of_runs_of_other_lengths_the_common_steps_are_compared(trace: Load) -> None:
    found = compare(trace("sgd"), trace("shorter"))
    assert found.verdict == "identical"
    assert told(found, "length") == [Difference("length", "steps", 6, 4)]
    assert found.gaps is not None
    assert len(found.gaps.loss) == 4
    assert (len(found.loss_a), len(found.loss_b)) == (6, 4)
    assert found.final_weights is None
    assert compare(trace("shorter"), trace("times W")).verdict == "different"


def test_a_loop_that_fails_leaves_a_trace_of_its_steps(trace: Load) -> None:
    failed = trace("fails")
    assert (failed.steps, failed.ranks) == (4, 2)
    assert failed.facts["ended"] == "ArithmeticError: planted"
    assert failed.final_weights == {}
    found = compare(trace("sgd"), failed)
    assert found.verdict == "identical"
    assert Difference("length", "ended by an error", None, "ArithmeticError: planted") in found.differences


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("other data", "batch of step 3"),
        ("data in another order", "the same batches in another order: batch of step 3"),
        ("data, a step on", "the same batches, of which b is 1 ahead: batch of step 1"),
        ("one batch for all ranks", "all ranks read the same batch"),
        ("ranks the other way round", "which rank reads which batch, first in step 1"),
    ],
)
def test_batches_that_differ_are_told(trace: Load, name: str, what: str) -> None:
    found = told(compare(trace("sgd"), trace(name)), "data")
    assert found[0].what == what
    assert found[0].a != found[0].b


def test_another_fingerprint_of_the_same_numbers_is_no_parting(trace: Load) -> None:
    found = compare(trace("sgd"), replace(trace("sgd"), batches=trace("sgd").batches + 1))
    assert (found.verdict, found.parting) == ("round-off", None)
    assert found.first_bit is not None
    assert found.first_bit.quantity == "data"


def test_what_the_runs_were_told_is_compared(trace: Load) -> None:
    found = compare(trace("sgd"), trace("told to clip"))
    assert told(found, "strategy")[1:] == [Difference("strategy", "max_grad_norm", None, 0.5)]
    found = compare(trace("adamw"), trace("eps 1e-3"))
    assert told(found, "optimizer") == [Difference("optimizer", f"group {group}: eps", 1e-8, 1e-3) for group in (1, 2)]
    found = compare(trace("sgd"), trace("adamw"))
    assert told(found, "optimizer") == [
        Difference("optimizer", "class", "SGD", "AdamW"),
        Difference("optimizer", "groups", 1, 2),
    ]
    facts = trace("sgd").facts
    changed = with_facts(
        trace("sgd"),
        versions={**facts["versions"], "torch": "1.0"},
        seeds={**facts["seeds"], "torch": 7},
        environment={**facts["environment"], "OMP_NUM_THREADS": "8"},
        device={**facts["device"], "threads": 8},
    )
    kinds_told = [(item.kind, item.what, item.b) for item in compare(trace("sgd"), changed).differences]
    assert kinds_told == [
        ("seed", "torch", 7),
        ("version", "torch", "1.0"),
        ("environment", "OMP_NUM_THREADS", "8"),
        ("device", "threads", 8),
    ]
    assert compare(trace("sgd"), changed).verdict == "identical"


def test_start_weights_are_told(trace: Load) -> None:
    found = told(compare(trace("sgd"), trace("another start")), "start")
    assert [item.what for item in found[:2]] == ["outer.weight", "outer.bias"]
    assert found[-1].what == "and 5 more weights"


def test_of_one_backend_every_setting_that_changed_is_told(trace: Load) -> None:
    old = {"Config.bucket": 5, "Config.overlap": True, "Config.gone": 1, "Config.same": 0}
    new = {"Config.bucket": 9, "Config.overlap": True, "Config.new": 2, "Config.same": 0}
    found = compare(with_facts(trace("sgd"), configuration=old), with_facts(trace("sgd"), configuration=new))
    assert told(found, "configuration") == [
        Difference("configuration", "Config.bucket", 5, 9),
        Difference("configuration", "Config.gone", 1, None, "b"),
        Difference("configuration", "Config.new", None, 2, "a"),
    ]


def test_of_two_backends_settings_that_only_one_has_are_counted(trace: Load) -> None:
    one, two = trace("ddp, adamw"), trace("stage 2, adamw")
    found = told(compare(one, two), "configuration")
    assert found[-1].what == "number of settings that only one has"
    assert found[-1].b > 100
    assert len(found) < 5


def test_settings_alone_make_no_difference(trace: Load) -> None:
    found = compare(
        with_facts(trace("sgd"), configuration={"A.b": 1}), with_facts(trace("sgd"), configuration={"A.b": 2})
    )
    assert (found.verdict, found.diagnoses) == ("identical", [])


def test_steps_that_both_left_out_are_the_same(trace: Load) -> None:
    gradients = trace("sgd").gradients.clone()
    gradients[1] = torch.inf
    applied = trace("sgd").applied.clone()
    applied[1] = False
    skipped = replace(trace("sgd"), gradients=gradients, applied=applied)
    assert compare(skipped, replace(skipped, gradients=gradients.clone())).verdict == "identical"


def test_the_order_of_parameters_does_not_matter(trace: Load) -> None:
    a = trace("adamw")
    turned = replace(
        with_facts(a, parameters=dict(reversed(a.facts["parameters"].items()))),
        gradients=a.gradients.flip(2),
        weights=a.weights.flip(2),
    )
    assert compare(a, turned).verdict == "identical"
    found = compare(turned, trace("no decay"))
    assert found.parting is not None
    assert found.parting.parameter in ("inner.weight", "outer.weight", "head.weight")
    assert [diagnosis.name for diagnosis in found.diagnoses] == ["optimizer mode"]


def test_a_parameter_of_zeros_and_one_without_a_gradient_are_told_apart(trace: Load) -> None:
    a = trace("sgd")
    gradients = a.gradients.clone()
    gradients[:, :, a.parameters.index("unused.weight"), SQUARE] = 0.0
    found = compare(a, replace(a, gradients=gradients))
    assert found.verdict == "round-off"
    assert found.first_bit is not None
    assert (found.first_bit.quantity, found.first_bit.parameter) == ("gradient", "unused.weight")


def test_traces_of_other_lengths_are_the_same_in_what_both_have_and_no_success(trace: Load) -> None:
    whole = trace("sgd")
    arrays = ("losses", "batches", "rates", "applied", "seconds", "gradients")
    short = replace(
        whole,
        **{name: getattr(whole, name)[:2] for name in arrays},
        weights=whole.weights[:3],
        final_weights={},
    )
    found = compare(whole, short)
    assert (found.verdict, found.exit_code) == ("identical", 2)
    assert f"the 2 steps that both have, of {whole.steps} in a and 2 in b" in verdict(found)


def test_a_repetition_of_something_else_is_refused(trace: Load) -> None:
    with pytest.raises(InputError, match="again is another run of the same as a: its optimizer differs"):
        compare(trace("sgd"), trace("sgd"), again=trace("adamw"))


def test_traces_of_losses_alone_are_compared_by_what_they_hold(trace: Load) -> None:
    whole = trace("sgd")
    bare = replace(
        whole,
        facts=whole.facts | {"detail": "losses"},
        gradients=torch.zeros_like(whole.gradients).index_fill(-1, torch.tensor(0), ABSENT),
        weights=torch.cat(
            [
                whole.weights[:1],
                torch.zeros_like(whole.weights[1:-1]).index_fill(-1, torch.tensor(0), ABSENT),
                whole.weights[-1:],
            ]
        ),
    )
    assert compare(bare, bare).verdict == "identical"
    mixed = compare(whole, bare)
    assert (mixed.parting, mixed.diagnoses) == (None, [])
    other = replace(bare, losses=bare.losses * 1.5)
    assert compare(bare, other).verdict == "different"


def test_the_gap_of_a_multiple_is_exact(trace: Load) -> None:
    whole = trace("sgd")
    twice = whole.gradients.clone()
    twice[..., SQUARE] *= 4
    twice[..., SQUARE + 1 :] *= 2
    found = compare(whole, replace(whole, gradients=twice))
    assert found.parting is not None
    assert found.parting.relative == pytest.approx(1.0, rel=1e-6)
