"""Recording a session: what is kept, and what it leaves alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Session, testing
from shardkit._prepare import overriding
from shardkit.errors import InputError, LaunchError, StateError, TraceError
from shardkit.parity import Trace, record
from shardkit.parity._sketch import places


class Net(nn.Module):
    """With a frozen layer, one that is never called, and a weight that two names share."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 2)

    def forward(self, values: Tensor) -> Tensor:
        return self.frozen(self.b(torch.tanh(self.a(values))))  # type: ignore[no-any-return]


def opened(strategy: str = "ddp", lr: float = 0.1) -> Session:
    torch.manual_seed(0)
    model = Net()
    return shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), strategy)


def values(step: int, rank: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def take(session: Session, step: int = 0, scale: float = 1.0) -> bool:
    session.backward(session.model(values(step, session.rank)).square().mean() * scale)
    return session.step()


def trace_of(recording: Any) -> Trace:
    assert recording.trace is not None
    return recording.trace  # type: ignore[no-any-return]


def test_a_recorded_session_does_as_it_did_and_nothing_of_it_stays() -> None:
    with opened("ddp:accumulate=2,max_grad_norm=0.01") as session:
        alone = [take(session, step) for step in range(4)]
        weights, norm = session.full_weights(), session.grad_norm
    with opened("ddp:accumulate=2,max_grad_norm=0.01") as session:
        before, hooks = dict(vars(session)), len(session.model._forward_pre_hooks)
        assert "step" not in before
        with record(session, None) as recording:
            recorded = [take(session, step) for step in range(4)]
        assert recorded == alone == [False, True, False, True]
        assert session.grad_norm == norm
        assert all(session.full_weights()[name].equal(value) for name, value in weights.items())
        assert vars(session).keys() == before.keys()
        assert len(session.model._forward_pre_hooks) == hooks
        assert session.step.__func__ is Session.step  # type: ignore[attr-defined]
        assert trace_of(recording).steps == 2
        take(session, 4)
        take(session, 5)
        assert trace_of(recording).steps == 2
        with record(session, None) as second:
            take(session, 6)
            take(session, 7)
        assert trace_of(second).steps == 1


def test_to_close_the_session_within_the_context_ends_the_recording(tmp_path: Path) -> None:
    with opened() as session, record(session, tmp_path / "run.trace") as recording:
        take(session)
        session.close()
        assert Trace.load(tmp_path / "run.trace").steps == 1
    assert trace_of(recording).final_weights.keys() == Net().state_dict().keys()


def within(session: Session, **keywords: Any) -> None:
    with record(session, None, **keywords):
        raise AssertionError("it was not refused")


def test_what_cant_be_recorded_is_refused_and_leaves_the_session_as_it_was() -> None:
    with opened("ddp:accumulate=2") as session:
        with pytest.raises(InputError, match='detail is "losses", "sketch" or "whole", not \'all\''):
            within(session, detail="all")
        take(session)
        with pytest.raises(StateError, match="record"):
            within(session)
        take(session)
        with record(session, None) as recording:
            with pytest.raises(StateError, match="recorded already: end that recording first"):
                within(session)
            take(session)
            take(session)
        assert trace_of(recording).steps == 1


def test_a_session_that_only_evaluates_or_is_closed_is_refused() -> None:
    with shardkit.prepare(Net(), None, "ddp") as session, pytest.raises(StateError, match="optimizer"):
        within(session)
    with pytest.raises(StateError, match="closed"):
        within(session)


def test_a_recording_without_a_step_is_refused() -> None:
    with opened() as session:
        with pytest.raises(TraceError, match="no step was recorded"), record(session, None):
            pass
        assert take(session)


def test_frozen_and_unused_parameters_have_no_gradient_and_tied_ones_are_one() -> None:
    with opened() as session, record(session, None) as recording:
        take(session)
    trace = trace_of(recording)
    there = dict(zip(trace.parameters, trace.has_gradient[0, 0].tolist(), strict=True))
    assert there == {
        "a.weight": True,
        "frozen.weight": False,
        "frozen.bias": False,
        "unused.weight": False,
        "unused.bias": False,
    }
    trainable = [name for name, facts in trace.facts["parameters"].items() if facts["trainable"]]
    assert trainable == ["a.weight", "unused.weight", "unused.bias"]
    model = _reference()
    assert torch.isclose(trace.gradient_norm[0, 0], model.a.weight.grad.double().norm(), rtol=1e-6)
    assert trace.final_weights["a.weight"].equal(trace.final_weights["b.weight"])


def _reference() -> Any:
    torch.manual_seed(0)
    model = Net()
    model(values(0)).square().mean().backward()
    return model


def test_the_gradient_is_that_before_clipping_and_a_sample_is_an_element() -> None:
    with opened("ddp:max_grad_norm=1e-3") as session, record(session, None, detail="whole") as recording:
        take(session)
    trace, gradient = trace_of(recording), _reference().a.weight.grad
    assert torch.allclose(trace.whole_gradients["a.weight"][0], gradient)
    assert trace.whole_gradients["unused.bias"][0].isnan().all()
    row = trace.gradient_samples[0, 0, trace.parameters.index("a.weight")].float()
    assert row.equal(gradient.flatten())


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 17, 26, 64, 144, 336, 4096, 10**6])
def test_a_sketch_samples_as_many_places_as_it_has_room_for(numel: int) -> None:
    found = places(numel)
    assert len(set(found)) == min(16, numel)
    assert found == sorted(found)
    assert all(0 <= place < numel for place in found)


def test_losses_rates_and_batches_are_those_of_each_step() -> None:
    with opened("ddp:accumulate=2", lr=1.0) as session, record(session, None) as recording:
        schedule = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, 0.5)
        told = []
        for step in (0, 1, 0, 1, 2, 3):
            loss = session.model(values(step)).square().mean()
            told.append(loss.item())
            session.backward(loss)
            if session.step():
                schedule.step()
    trace = trace_of(recording)
    assert trace.losses[:, 0].flatten().tolist() == told
    assert trace.rates.flatten().tolist() == [1.0, 0.5, 0.25]
    assert trace.data[0] == trace.data[1] != trace.data[2]
    assert trace.applied.tolist() == [True] * 3


def test_batches_that_are_told_stand_in_for_what_the_module_is_called_with() -> None:
    found = []
    for targets in (torch.zeros(3), torch.zeros(3), torch.ones(3)):
        with opened() as session, record(session, None) as recording:
            recording.batch((values(0), targets))
            take(session)
        found.append(int(trace_of(recording).data[0]))
    assert found[0] == found[1] != found[2]


def test_an_evaluation_within_is_no_batch() -> None:
    with opened() as session, record(session, None) as recording:
        with session.evaluate() as module:
            module(values(7))
        take(session)
        session.model.eval()
        with torch.no_grad():
            session.model(values(8))
        session.model.train()
        take(session)
    assert trace_of(recording).batches[:, 0].shape == (2, 1)
    assert trace_of(recording).data[0] == trace_of(recording).data[1]


@pytest.mark.filterwarnings("ignore:.*was left out on every rank")
def test_a_step_that_is_left_out_is_kept_with_its_nan() -> None:
    with opened("ddp:on_nonfinite=skip") as session, record(session, None) as recording:
        assert take(session, 0)
        assert not take(session, 1, math.nan)
        assert take(session, 2)
    trace = trace_of(recording)
    assert trace.applied.tolist() == [True, False, True]
    assert trace.losses.flatten().isnan().tolist() == [False, True, False]
    assert trace.gradient_norm[:, 0].isnan().tolist() == [False, True, False]
    assert trace.has_gradient[1, 0, 0]
    assert trace.weights[1].equal(trace.weights[2])
    assert not trace.weights[2].equal(trace.weights[3])


def test_a_step_that_is_refused_ends_the_recording_with_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"

    def train(session: Session) -> None:
        with record(session, path):
            take(session, 0)
            take(session, 1, math.nan)

    with opened() as session, pytest.raises(ArithmeticError):
        train(session)
    trace = Trace.load(path)
    assert trace.facts["ended"].startswith("NonFiniteError")
    assert trace.applied.tolist() == [True, False]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_recorded_unscaled(precision: str) -> None:
    norms = {}
    for one in ("fp32", precision):
        with opened(f"ddp:precision={one}") as session, record(session, None) as recording:
            take(session)
        norms[one] = float(trace_of(recording).gradient_norm[0, 0])
        assert trace_of(recording).facts["settings"]["precision"] == one
    assert norms[precision] == pytest.approx(norms["fp32"], rel=0.02)


def test_the_recordings_own_time_is_no_part_of_a_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.parity import _shares

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*arguments: Any) -> Any:
            time.sleep(0.2)
            return function(*arguments)

        return slower

    for name in ("gradients", "weights"):
        monkeypatch.setattr(_shares.Shares, name, slow(getattr(_shares.Shares, name)))
    with opened() as session, record(session, None) as recording:
        for step in range(3):
            time.sleep(0.05 if step == 1 else 0.0)
            take(session, step)
    seconds = recording.step_seconds
    assert max(seconds) < 0.2
    assert seconds[1] >= 0.05
    assert trace_of(recording).seconds[:, 0].tolist() == seconds


def test_progress_is_told_of_each_step_and_numbers_are_kept_by_rank() -> None:
    told = []
    with opened() as session, record(session, None) as recording:
        recording.progress = lambda: told.append(session.steps)
        take(session, 0)
        take(session, 1)
        recording.add("answer", 42.0)
    assert told == [1, 2]
    assert trace_of(recording).facts["per_rank"] == {"answer": [42.0]}


def _on_two(folder: Path) -> list[str]:
    """Record on two ranks, in ways that go wrong on one of them, and return what each rank was told."""
    told = []
    with opened() as session:
        with record(session, folder / "two.trace") as recording:
            take(session, 0)
        told.append("" if recording.trace is None else "has the trace")
        try:
            with record(session, folder / "absent" / "x.trace" if session.rank else folder / "file" / "x.trace"):
                take(session, 1)
        except TraceError as error:
            told.append(str(error))
    with opened() as session:
        try:
            with record(session, folder / "failed.trace"):
                take(session, 0)
                if session.rank == 1:
                    raise KeyError("planted")
                raise ValueError("planted too")
        except (KeyError, ValueError) as error:
            told.append(type(error).__name__)
    return told


def test_ranks_write_one_trace_and_hear_of_each_others_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one, other = testing.run(_on_two, tmp_path, processes=2, timeout=60)
    assert one[0] == "has the trace"
    assert other[0] == ""
    assert one[1] == other[1]
    assert "can't be written" in one[1]
    assert (one[2], other[2]) == ("ValueError", "KeyError")
    assert Trace.load(tmp_path / "two.trace").ranks == 2
    failed = Trace.load(tmp_path / "failed.trace")
    assert (failed.steps, failed.ranks) == (1, 2)
    assert failed.facts["ended"] == "ValueError: planted too"


def _fails_on_one(path: Path) -> None:
    with opened() as session, record(session, path):
        take(session, 0)
        if session.rank == 1:
            raise KeyError("planted")
        take(session, 1)


@pytest.mark.slow
def test_a_rank_that_fails_alone_is_told_of_and_no_half_trace_is_left(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match="KeyError: 'planted'"):
        testing.run(_fails_on_one, tmp_path / "run.trace", processes=2, timeout=60)
    assert time.monotonic() - start < 40
    if (tmp_path / "run.trace").exists():
        assert Trace.load(tmp_path / "run.trace").facts["ended"]


def _under(strategies: list[tuple[str, bool]]) -> list[Trace | None]:
    recordings = []
    for strategy, control in strategies:
        with (
            overriding(control=control, any_version=False),
            opened(strategy) as session,
            record(session, None) as recording,
        ):
            for step in range(2):
                take(session, step)
        recordings.append(recording)
    return [recording.trace for recording in recordings]


def test_parameters_that_a_module_holds_in_parts_or_hides_are_sketched_from_their_shards() -> None:
    strategies = [("ddp", False), ("fsdp", False), ("fsdp", True)]
    whole, *sharded = testing.run(_under, strategies, processes=2, timeout=60)[0]
    assert whole.weight_samples.any()
    for one in sharded:
        assert one.parameters == whole.parameters
        for kind in ("weight_samples", "weight_norms", "gradient_samples"):
            found, expected = getattr(one, kind)[:, 0], getattr(whole, kind)[:, 0]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
