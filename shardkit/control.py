"""What controls share: engines that are a library by itself, as its documentation shows (``shardkit_control``)."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from shardkit._engine import Engine, Shard
from shardkit.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit._strategy import Strategy


class ControlEngine(Engine):
    """A wrapper with ``no_sync`` around the module, in whose backward gradients are averaged.

    A subclass sets ``model``, the wrapper, and begins the first window; it says how to step, and drops the gradients
    there and begins the next one. ``backend`` is the name that errors bear.
    """

    model: Any
    optimizer: Optimizer
    # So that ranks with fewer micro-batches refuse along with the others, which wait for them in a forward.
    lockstep = "forward"

    def __init__(self, backend: str, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        if strategy.precision == "fp16":
            raise UnsupportedError(f"the control of backend {backend!r} trains in precision fp32 or bf16, not in fp16")
        if optimizer.state:
            raise InputError(f"the control of backend {backend!r} begins with a fresh optimizer: this one has state")
        self.optimizer = optimizer
        self.module = model
        # Nothing is clipped at infinity, and the norm is told.
        self.bound = math.inf if strategy.max_grad_norm is None else strategy.max_grad_norm
        self.wants_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._backend = backend
        self._accumulate = strategy.accumulate
        self._checked: Tensor | None = None
        self._alone: ExitStack | None = None

    def begin(self) -> None:
        """Begin a window."""
        self._micro = 0
        if self._accumulate > 1:
            # The forward of a micro-batch, too, must know that others follow.
            self._alone = ExitStack()
            self._alone.enter_context(self.model.no_sync())

    def follow(self, groups: list[dict[str, Any]]) -> None:
        """Give the groups of the library's optimizer the settings of the user's."""
        for user, own in zip(self.optimizer.param_groups, groups, strict=True):
            own.update((key, value) for key, value in user.items() if key not in ("params", "param_names"))

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        self._check(gradient)
        loss.backward(gradient)
        self._micro += 1
        if self._micro == self._accumulate - 1:
            self._synchronize()

    def _check(self, gradient: Tensor) -> None:
        """Raise unless the window is a whole one of micro-batches that count the same."""
        if gradient is self._checked:
            return
        share = gradient.item()
        if not math.isnan(share):
            if not math.isclose(share, 1 / self._accumulate, rel_tol=torch.finfo(gradient.dtype).eps):
                raise UnsupportedError(
                    f"the control of backend {self._backend!r} averages at micro-batch {self._accumulate} of a window "
                    f"and can't give one the weight {share:.4g}: every window must have that many on every rank"
                )
            self._checked = gradient

    def _synchronize(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None

    def full_gradients(self) -> dict[str, Tensor]:
        return {
            name: value.grad.detach().to("cpu", copy=True)
            for name, value in self.module.named_parameters()
            if value.grad is not None
        }

    def full_weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}

    def weight_shards(self) -> list[Shard]:
        return [Shard(name, 0, value.detach()) for name, value in self.module.named_parameters()]

    def state_shards(self) -> list[Shard]:
        raise UnsupportedError(f"the control of backend {self._backend!r} is for comparing runs: its state isn't saved")

    def restart(self) -> None:
        self.state_shards()

    def close(self) -> None:
        self._synchronize()
        for value in self.module.parameters():
            value.grad = None
            # Memory of its own again, and no view of a buffer of the library's.
            value.data = value.data.clone()
