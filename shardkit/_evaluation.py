"""The engine of a session without an optimizer: whole weights everywhere, nothing to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

from shardkit._engine import Engine
from shardkit.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor, nn


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

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
