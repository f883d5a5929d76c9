"""Windows on one process and on three; the cases in tests/cases/windows.py run on two under every strategy."""

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
from tests.cases._models import W, assert_close, sgd


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
    first = 14 / 4 if "stage=3" in strategy else 10 / 3
    for weight in weights:
        assert_close(weight, [1 - 0.1 * first - 0.1 * 3])


def _three_ranks(strategy: str) -> torch.Tensor:
    rank = int(os.environ["RANK"])
    # Stage 3 needs at least one on each rank.
    second = [[4.0]] if "stage=3" in strategy else []
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
