"""A signal becomes a save at the next step boundary, on all ranks at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import shardkit
from shardkit.errors import InputError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd, step

STEPS = 6


def trained(folder: Path, signalled: int | None) -> tuple[int, int, torch.Tensor]:
    """Train to the end or to a signal that rank 1 gets in a step; go on from a checkpoint that is there.

    Returns the steps that were made before this process and in all, and the weights.
    """
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        schedule = LambdaLR(session.optimizer, lambda epoch: 1 / (epoch + 1))
        session.catch(signal.SIGTERM)
        session.load(folder, objects={"schedule": schedule}, missing_ok=True)
        before = session.steps
        while session.steps < STEPS:
            if session.steps == signalled and session.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if step(session, session.model([session.rank + session.steps])):
                schedule.step()
            if session.interrupted:
                session.save(folder, objects={"schedule": schedule})
                break
        return before, session.steps, session.full_weights()["w"]


def test_a_signal_on_one_rank_becomes_a_save_on_all_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    for before, steps, _ in run(trained, tmp_path / "c", 2):
        assert (before, steps) == (0, 3)
    resumed = run(trained, tmp_path / "c", None)
    whole = run(trained, tmp_path / "none", None)
    for (before, steps, weights), (_, _, expected) in zip(resumed, whole, strict=True):
        assert (before, steps) == (3, STEPS)
        assert torch.equal(weights, expected)


def test_signals_do_what_they_did_once_the_session_is_closed() -> None:
    came: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        model = W(1)
        with shardkit.prepare(model, sgd(model), "ddp") as session:
            session.catch(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert not came
            assert not session.interrupted, "it is told of after a step"
            step(session, session.model([1.0]))
            assert session.interrupted
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_what_cannot_be_caught_is_refused() -> None:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        with pytest.raises(InputError, match="can't be caught here"):
            session.catch(signal.SIGKILL)
        told: list[BaseException] = []

        def elsewhere() -> None:
            try:
                session.catch(signal.SIGTERM)
            except InputError as error:
                told.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "main thread" in str(told[0])
