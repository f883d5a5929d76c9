"""What an optimizer holds of the tensors that it updates, known by having it step on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from shardkit.optimizers import twin
from shardkit.planner._ledger import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shardkit._footprint import Stepped


class Cost(NamedTuple):
    """Bytes: ``state`` of an optimizer after its first steps, and the most that a step holds beside it, in passing."""

    state: int
    passing: int


class _Numbers(TorchFunctionMode):
    """Within this context, a tensor without memory that is asked for its number says 1.

    Some optimizers ask for a norm; what they make of it changes no shape.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ASKING:
            return 1 if function is torch.Tensor.__int__ else True if function is torch.Tensor.__bool__ else 1.0
        return function(*args, **(kwargs or {}))


_ASKING = (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__)


class Stepper:
    """Has copies of the user's optimizer step on tensors of given shapes, each shape of a group once."""

    def __init__(self, optimizer: Optimizer, names: dict[str, Any], *, device: str) -> None:
        self._optimizer = optimizer
        self._device = device
        self._mode = FakeTensorMode()
        self._groups = {
            name: group
            for group in optimizer.param_groups
            for name, value in names.items()
            if any(value is other for other in group["params"])
        }
        self._known: dict[tuple[Any, ...], Cost] = {}

    def cost(self, stepped: Sequence[Stepped]) -> Cost:
        """Return what updating these tensors costs together.

        Where two tensors of a shape take twice as much in passing as one, as fused and foreach optimizers do that
        compute all at a time, what each takes adds up; else the largest counts.
        """
        state = passing = 0
        at_a_time: list[int] = []
        for item in stepped:
            group = self._groups.get(item.like) or self._optimizer.param_groups[0]
            one = self._measured(group, item.shape, 1)
            two = self._measured(group, item.shape, 2)
            state += one.state
            if two.passing > 1.5 * one.passing:
                passing += one.passing
            else:
                at_a_time.append(one.passing)
        return Cost(state, passing + max(at_a_time, default=0))

    def _measured(self, group: dict[str, Any], shape: tuple[int, ...], count: int) -> Cost:
        key = (id(group), shape, count)
        if key not in self._known:
            self._known[key] = self._measure(group, shape, count)
        return self._known[key]

    def _measure(self, group: dict[str, Any], shape: tuple[int, ...], count: int) -> Cost:
        with self._mode:
            values = [torch.nn.Parameter(torch.empty(shape, dtype=torch.float32)) for _ in range(count)]
            settings = {**group, "params": values}
            settings.pop("param_names", None)
            if self._device == "cuda" and group.get("foreach") is None and not group.get("fused"):
                # What torch.optim chooses there.
                settings["foreach"] = "foreach" in group
            optimizer = twin(self._optimizer, [settings])
            ledger = Ledger()
            with torch.no_grad():
                for value in values:
                    value.grad = torch.empty_like(value)
            for value in values:
                ledger.leave_out(value)
                assert value.grad is not None
                ledger.leave_out(value.grad)
            with ledger, _Numbers():
                optimizer.step()
                state = ledger.now
                ledger.forget_high()
                optimizer.step()
            return Cost(state, ledger.high - state)
