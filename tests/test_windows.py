"""Windows on one process and on three; the cases in shardkit/testing/cases run on two under every strategy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit import Strategy
from shardkit.errors import InputError, StateError
from shardkit.testing import run
from shardkit.testing.cases._models import W, assert_close, sgd


def test_one_process_needs_no_launcher() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), Strategy("ddp", accumulate=2)) as session:
        windows = session.windows([[1.0], [2.0], [5.0]])
        assert len(windows) == 2
        lengths = []
        for window in windows:
            lengths.append((len(window), window.weight, window.counts))
            for batch in window:
                session.backward(session.model(batch))
            assert session.step()
        assert lengths == [(2, 2.0, [2]), (1, 1.0, [1])]
        assert (windows.epoch, windows.position) == (1, 0)
    assert_close(model.w, [1 - 0.15 - 0.5])


def test_the_plain_loop_goes_on_as_ever_after_windows() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), Strategy("ddp", accumulate=2)) as session:
        for window in session.windows([[4.0]]):
            for batch in window:
                session.backward(session.model(batch))
            session.step()
        for value in (1.0, 3.0):
            session.backward(session.model([value]))
            moved = session.step()
        assert moved
    assert_close(model.w, [1 - 0.4 - 0.2])


def test_a_generator_is_read_one_window_ahead_and_no_further() -> None:
    drawn = []

    def loader() -> Any:
        for index in range(6):
            drawn.append(index)
            yield [1.0]

    model = W(1)
    with shardkit.prepare(model, sgd(model), Strategy("ddp", accumulate=2)) as session:
        for number, window in enumerate(session.windows(loader()), start=1):
            assert len(drawn) == 2 * number
            for batch in window:
                session.backward(session.model(batch))
            session.step()


def test_a_pass_that_was_left_starts_anew() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        windows = session.windows([[1.0], [2.0], [3.0]])
        for _ in range(2):
            for window in windows:
                for batch in window:
                    session.backward(session.model(batch))
                session.step()
                break
        assert windows.position == 1
    assert_close(model.w, [0.8])


def test_a_pass_is_over_once_another_one_started_or_a_checkpoint_was_loaded(tmp_path: Path) -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        windows = session.windows([[1.0], [2.0], [3.0]])
        first = iter(windows)
        for batch in next(first):
            session.backward(session.model(batch))
        session.step()
        session.save(tmp_path)
        for again in (lambda: next(iter(windows)), lambda: session.load(tmp_path)):
            stale = iter(windows)
            for batch in next(stale):
                session.backward(session.model(batch))
            session.step()
            again()
            session.load(tmp_path)
            with pytest.raises(StateError, match="another one was started, or a checkpoint loaded"):
                next(stale)
        # Whoever goes on from the checkpoint goes on behind its window.
        for window in windows:
            for batch in window:
                session.backward(session.model(batch))
            session.step()
        assert session.steps == 3
    assert_close(model.w, [1 - 0.1 - 0.2 - 0.3])


def test_uneven_is_use_or_refuse() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session, pytest.raises(InputError, match="not 'drop'"):
        session.windows([], uneven="drop")  # type: ignore[arg-type]


def test_a_session_that_only_evaluates_has_no_windows() -> None:
    with shardkit.prepare(W(1), None, "ddp") as session, pytest.raises(StateError, match="only evaluates"):
        session.windows([])


def test_gather_on_one_process_gives_the_values_back() -> None:
    with shardkit.prepare(W(1), None, "ddp") as session:
        assert session.gather(torch.arange(3)).tolist() == [0, 1, 2]
        assert session.gather(torch.empty(0, 2)).shape == (0, 2)


def test_three_ranks_with_different_numbers_end_together(strategy: str) -> None:
    weights = run(_three_ranks, strategy, processes=3, timeout=120)
    # Windows of up to two: (1, 2, 7) or (1, 2, 4, 7), then (3): each micro-batch counts the same.
    first = 14 / 4 if _shards_parameters(strategy) else 10 / 3
    for weight in weights:
        assert_close(weight, [1 - 0.1 * first - 0.1 * 3])


def _shards_parameters(strategy: str) -> bool:
    variants = shardkit.backends()[Strategy.parse(strategy).backend].variants
    return any(one.strategy == strategy and "parameters" in one.shards for one in variants)


def _three_ranks(strategy: str) -> torch.Tensor:
    rank = int(os.environ["RANK"])
    # Where modules gather, each rank needs at least one.
    second = [[4.0]] if _shards_parameters(strategy) else []
    own: list[list[float]] = [[[1.0], [2.0], [3.0]], second, [[7.0]]][rank]
    model = W(1)
    asked = Strategy.parse(strategy)
    with shardkit.prepare(model, sgd(model), replace(asked, accumulate=2)) as session:
        for window in session.windows(own):
            assert window.counts == [[2, len(second), 1], [1, 0, 0]][session.steps]
            for batch in window:
                session.backward(session.model(batch))
            assert session.step()
        return session.full_weights()["w"]


def _train(session: shardkit.Session, windows: Any) -> list[float]:
    seen = []
    for window in windows:
        for batch in window:
            seen.append(float(torch.as_tensor(batch).flatten()[0]))
            session.backward(session.model([1.0]))
        session.step()
    return seen


def test_windows_made_anew_in_each_epoch_go_on_after_a_checkpoint_at_an_epochs_end(tmp_path: Path) -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        for window in session.windows([1.0, 2.0, 3.0]):
            for _ in window:
                session.backward(session.model([1.0]))
            session.step()
            if session.steps == 3:
                session.save(tmp_path)
    other = W(1)
    with shardkit.prepare(other, sgd(other), "ddp") as session:
        session.load(tmp_path)
        assert [_train(session, session.windows([1.0, 2.0, 3.0])) for _ in range(3)] == [[], [1, 2, 3], [1, 2, 3]]


def test_a_break_at_the_top_of_a_window_gives_it_up() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        windows = session.windows([1.0, 2.0, 3.0], weight=lambda _: 10.0)
        for _ in windows:
            break
        # The plain loop, whose loss is a mean.
        session.backward(session.model([1.0]))
        assert session.step()
        assert _train(session, windows) == [1, 2, 3]
        assert _train(session, session.windows([5.0])) == [5]
    assert_close(model.w, [1 - 0.1 - 0.03 - 0.1])


def test_saving_before_a_window_was_used_is_refused(tmp_path: Path) -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        for window in session.windows([1.0, 2.0]):
            with pytest.raises(StateError, match="save in mid-window"):
                session.save(tmp_path)
            for _ in window:
                session.backward(session.model([1.0]))
            session.step()
            session.save(tmp_path)


def test_a_second_pass_beside_another_is_refused() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        first = iter(session.windows([1.0, 2.0]))
        next(first)
        with pytest.raises(StateError, match="a session has one position"):
            next(iter(session.windows([3.0])))


def test_a_micro_batch_that_was_left_out_is_refused_at_the_step() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), Strategy("ddp", accumulate=2)) as session:
        for window in session.windows([1.0, 2.0]):
            for batch in window:
                if batch == 1.0:
                    session.backward(session.model([1.0]))
            with pytest.raises(StateError, match=r"1 of this window's 2 micro-batches"):
                session.step()
            break


@pytest.mark.parametrize("own", [False, True])
def test_a_later_pass_goes_on_with_a_generator_of_the_loaders_own(tmp_path: Path, own: bool) -> None:
    def loader() -> Any:
        generator = torch.Generator().manual_seed(4)
        data = [torch.tensor(float(value)) for value in range(6)]
        if own:
            sampler = torch.utils.data.RandomSampler(data, generator=generator)
            return torch.utils.data.DataLoader(data, batch_size=None, sampler=sampler)
        return torch.utils.data.DataLoader(data, batch_size=None, shuffle=True, generator=generator)

    model = W(1)
    whole = []
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        windows = session.windows(loader())
        for _ in range(2):
            for window in windows:
                for batch in window:
                    whole.append(batch.item())
                    session.backward(session.model([1.0]))
                session.step()
                if session.steps == 8:
                    session.save(tmp_path)
    other = W(1)
    with shardkit.prepare(other, sgd(other), "ddp") as session:
        session.load(tmp_path)
        assert _train(session, session.windows(loader())) == whole[8:]


def test_a_loader_that_ends_before_the_position_is_refused(tmp_path: Path) -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        for window in session.windows([1.0, 2.0, 3.0, 4.0]):
            for _ in window:
                session.backward(session.model([1.0]))
            session.step()
            if session.steps == 3:
                session.save(tmp_path)
        session.load(tmp_path)
        with pytest.raises(InputError, match="behind 3 micro-batches of this pass, and the loader gives only 2"):
            _train(session, session.windows([1.0, 2.0]))


def test_step_may_follow_each_micro_batch_of_a_window_and_the_plain_loop_a_pass() -> None:
    model = W(0)
    with shardkit.prepare(model, sgd(model), "ddp:accumulate=4") as session:
        moved = []
        for window in session.windows([[1.0]] * 10):
            for batch in window:
                session.backward(session.model(batch))
                moved.append(session.step())
        assert moved == [False, False, False, True] * 2 + [False, True]
        for expected in (False, False, False, True):
            session.backward(session.model([1.0]))
            assert session.step() is expected
        assert session.steps == 4
        # Each gradient is the mean of ones, and the rate is 0.1.
        assert torch.allclose(session.full_weights()["w"], torch.tensor([-0.4]))
