"""Trainers with a training step of their own, over a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardkit
from shardkit.errors import StateError, UnsupportedError
from tests.transformers import tiny

_made: list[Any] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End the sessions of a test's Trainers, and with the last one the process group, which others would meet."""
    yield
    while _made:
        _made.pop().accelerator.end()


def made(folder: str, step: Any, **arguments: Any) -> Any:
    trainer = tiny.trainer(shardkit.transformers, folder, strategy="ddp", max_steps=2, **arguments)
    trainer.training_step = step.__get__(trainer)
    _made.append(trainer)
    return trainer


def twice(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    for _ in range(2):
        self.accelerator.backward(model(**inputs).loss)
    return torch.zeros(())


def test_a_second_backward_of_the_last_micro_batch_is_refused(tmp_path: Any) -> None:
    with pytest.raises(StateError, match="backward came again after"):
        made(str(tmp_path), twice).train()


def once_in_a_window(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    if not self.accelerator.sync_gradients:
        self.accelerator.backward(model(**inputs).loss)
    return torch.zeros(())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_whose_last_micro_batch_had_no_backward_is_refused_and_not_carried_on(
    accumulate: int, tmp_path: Any
) -> None:
    with pytest.raises(StateError, match="last micro-batch didn't come to"):
        made(str(tmp_path), once_in_a_window, gradient_accumulation_steps=accumulate).train()


def scaled(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = model(**inputs).loss / self.current_gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


def test_a_training_step_of_the_users_own_trains_as_under_the_library(tmp_path: Any) -> None:
    import transformers

    expected = tiny.trainer(transformers, str(tmp_path), max_steps=2)
    expected.training_step = scaled.__get__(expected)
    seen = tiny.trained(made(str(tmp_path), scaled))
    torch.testing.assert_close(seen.weights, tiny.trained(expected).weights, rtol=1e-6, atol=1e-7)


def test_what_the_accelerator_cannot_do_over_a_session_is_refused_with_what_can(tmp_path: Any) -> None:
    accelerator = made(str(tmp_path), scaled).accelerator
    with pytest.raises(UnsupportedError, match=r"trainer\.session\.save"):
        accelerator.save_state("folder")
    with pytest.raises(UnsupportedError, match=r"trainer\.session\.load"):
        accelerator.load_state("folder")
    with pytest.raises(UnsupportedError, match="--max_grad_norm"):
        accelerator.clip_grad_value_([], 1.0)
    with pytest.raises(UnsupportedError, match="asked for 3 in the norm 2: set --max_grad_norm"):
        accelerator.clip_grad_norm_([], 3.0)
    with pytest.raises(UnsupportedError, match="together with its optimizer"):
        accelerator.prepare(torch.nn.Linear(1, 1))
