"""The suite catches what is planted: each fault by a test that says what the backend did, and what is right."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from shardkit import _registry
from shardkit.testing import BackendSuite, _record, _suite
from shardkit.testing._checkpoints import moves
from shardkit.testing._suite import PAGE, NonconformingError
from shardkit.testing.cases._table import load_cases

ROOT = Path(__file__).parents[2]
PATHS = [Path(__file__).parent / "planted", ROOT / "docs/examples/shardkit-allreduce/src"]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the faulty backends installed: their distribution lies on the path."""
    monkeypatch.setattr(sys, "path", [*map(str, PATHS), *sys.path])
    importlib.invalidate_caches()


class Planted(BackendSuite):
    backend = "planted"


def judged(fault: str, name: str) -> None:
    """Run one case under a fault, and judge it."""
    strategy = f"planted:fault={fault}"
    outcomes = _record.record(strategy, {name: load_cases()[name].run})
    Planted()._judge(load_cases()[name], strategy, outcomes[name])


@pytest.mark.parametrize(
    ("fault", "case", "did", "right", "section"),
    [
        ("sums", "c01_gradients_are_averaged_and_not_summed", "rank 0 0.7; rank 1 0.7", "0.85", "public"),
        ("last-micro-batch", "c02_an_accumulated_window_is_the_mean_of_its_micro_batches", "rank 0", "0.75", "public"),
        ("zeros-for-none", "a_parameter_that_is_never_used_is_left_alone", "after step 1", "A parameter", "parameters"),
        ("norm-of-one-rank", "c10_the_gradient_norm_is_global_and_before_clipping", "does not hold", "C10", "public"),
        ("scaled", "gradients_are_unscaled_before_the_norm_and_the_clip", "rank 0", "", "precision"),
        ("wrong-on-rank-1", "c06_ranks_hold_the_same_weights_after_an_accumulated_step", "", "", "public"),
        ("rank-1-ends", "c01_gradients_are_averaged_and_not_summed", "lost the rank: rank 1", "every rank", "public"),
    ],
)
def test_a_fault_is_told_with_what_is_right_and_why(fault: str, case: str, did: str, right: str, section: str) -> None:
    with pytest.raises(NonconformingError) as found:
        judged(fault, case)
    assert did in found.value.did
    assert right in found.value.right
    assert found.value.page == f"{PAGE}#{section}"
    assert f"backend 'planted' under 'planted:fault={fault}'" in str(found.value)


def test_a_case_that_hangs_is_ended_and_told_with_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_record, "CASE_SECONDS", 4)
    with pytest.raises(NonconformingError, match=r"hung for 4 s(.|\n)*in _average"):
        judged("rank-1-waits", "c01_gradients_are_averaged_and_not_summed")


def test_after_a_case_that_takes_its_ranks_down_the_others_run() -> None:
    names = ["c25_a_parameter_listed_twice_is_refused", "c01_gradients_are_averaged_and_not_summed"]
    names += ["a_session_that_is_closed_says_so", "c33_a_session_without_optimizer_says_so"]
    found = _record.record("planted:fault=rank-1-ends", {name: load_cases()[name].run for name in names})
    assert [found[name][1].kind for name in names] == ["right", "lost", "lost", "right"]


def test_a_refusal_in_other_words_on_each_rank_is_none() -> None:
    judged("none", "sparse_gradients_are_averaged")
    with pytest.raises(NonconformingError, match="the same message on every rank"):
        judged("other-words", "sparse_gradients_are_averaged")


def test_a_refusal_where_a_case_must_hold_fails() -> None:
    refused = _record.Outcome("refused", "backend 'planted' can't", _record.told(RuntimeError("can't")))
    with pytest.raises(NonconformingError, match="C01 gradients are averaged"):
        Planted()._judge(load_cases()["c01_gradients_are_averaged_and_not_summed"], "planted", [refused, refused])


def test_a_checkpoint_without_the_optimizers_state_is_noticed() -> None:
    for strategy, kind in (("planted:fault=none", "right"), ("planted:fault=no-state", "wrong")):
        move = {"to ddp": moves(strategy, ["ddp"])["to ddp"]}
        assert {outcome.kind for outcome in _record.record(strategy, move)["to ddp"]} == {kind}


def test_memory_that_is_declared_to_be_split_and_is_not_is_noticed(request: pytest.FixtureRequest) -> None:
    suite = Planted()
    suite.test_a_rank_holds_no_more_than_its_share_between_windows("planted:fault=none", request)
    suite.test_a_rank_holds_no_more_than_its_share_of_gradients("planted:fault=none", request)
    suite.test_a_rank_holds_no_more_after_a_hundred_steps("planted:fault=none", request)
    with pytest.raises(NonconformingError, match=r"holds 3\.\d+ times the model's size(.|\n)*2\.00 times by what"):
        suite.test_a_rank_holds_no_more_than_its_share_between_windows("planted:bucket_mb=1", request)
    with pytest.raises(NonconformingError, match=r"holds 1\.\d+ times the model's size in gradients"):
        suite.test_a_rank_holds_no_more_than_its_share_of_gradients("planted:bucket_mb=1", request)
    with pytest.raises(NonconformingError, match=r"holds [\d,]+ bytes more after 100 steps"):
        suite.test_a_rank_holds_no_more_after_a_hundred_steps("planted:fault=leaks", request)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("large-left-out", "a_parameter_larger_than_any_bucket_trains_beside_small_ones"),
        ("no-hooks", "hooks_on_the_optimizers_step_are_called_once_a_step_on_every_rank"),
        ("bf16", "gradients_travel_in_float32_in_fp16"),
        ("hook-left", "a_closed_session_leaves_no_hook_behind"),
    ],
)
def test_what_a_tiny_model_hides_is_noticed(fault: str, case: str) -> None:
    with pytest.raises(NonconformingError):
        judged(fault, case)


def test_a_backend_that_imports_torch_to_describe_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heavy(BackendSuite):
        backend = "lazy"

    heavy = str(Path(__file__).parent / "heavy")
    monkeypatch.setattr(sys, "path", [heavy, *sys.path])
    monkeypatch.setenv("PYTHONPATH", heavy)
    with pytest.raises(NonconformingError, match=r"imported (numpy, )?torch to describe itself"):
        Heavy().test_to_describe_itself_imports_neither_torch_nor_a_library()


def test_cases_of_a_precision_that_is_not_declared_are_skipped_and_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, PATHS)))
    with pytest.raises(pytest.skip.Exception, match="doesn't declare precision 'bf16'"):
        judged("none", "weights_that_are_not_float32_are_refused_in_low_precision")
    for what in ("precision", "device", "option", "value"):
        Planted().test_what_it_does_not_declare_is_refused_before_its_library_is_imported(what)
    asked = [told["asked"] for told in _suite._probed("planted")["refused"]["precision"]]
    assert asked == ["precision bf16"]


def test_what_is_left_out_is_skipped_with_its_reason() -> None:
    class Some(BackendSuite):
        backend = "planted"
        left_out = {"c01*": "for one", "planted:fault=s* c02*": "for another"}  # noqa: RUF012

    assert Some.reason_left_out("c01_gradients", "planted:fault=none") == "for one"
    assert Some.reason_left_out("c02_windows", "planted:fault=sums") == "for another"
    assert Some.reason_left_out("c02_windows", "planted:fault=none") is None


def test_every_page_that_a_failure_points_to_is_there() -> None:
    headings = [line[3:].strip().lower() for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("## ")]
    tree = ast.parse(Path(_suite.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "_require" in ast.unparse(node.func)]
    words = [one.value for call in calls for one in call.args if isinstance(one, ast.Constant)]
    # Of the last kind of call, the one for shares, the text says what is held.
    sections = {word for word in words if isinstance(word, str) and word.isalpha()} - {"gradients"}
    assert sections == {"laziness", "declaration", "refusals", "checkpoints", "memory"}
    assert sections | {case.topic for case in load_cases().values()} <= set(headings)


def test_a_name_that_nobody_claims_says_how_to_install_it() -> None:
    class Nowhere(BackendSuite):
        backend = "nowhere"

    with pytest.raises(pytest.fail.Exception, match=r"no backend is named 'nowhere'.*installed are .*ddp"):
        Nowhere()._variants()


def test_the_faulty_backend_is_one_among_others() -> None:
    assert {"planted", "ddp"} <= set(_registry.backends())
