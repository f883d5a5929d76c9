"""Evaluation: within a session, and the engine of a session without an optimizer, which has nothing to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, final

from shardkit._engine import Engine
from shardkit.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Return a context in which the module and all its parts are in eval mode; then each is as it was."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in training.items():
            part.training = mode


@final
class EvaluationEngine(Engine):
    """Evaluates a module, such as a frozen teacher."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = None

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> NoReturn:
        raise StateError("this session has no optimizer: prepare was given None, so it only evaluates")

    def step(self) -> NoReturn:
        raise StateError("this session has no optimizer: prepare was given None, so it only evaluates")

    def full_gradients(self) -> NoReturn:
        raise StateError("this session has no optimizer: prepare was given None, so it only evaluates")
