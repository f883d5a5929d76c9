"""Stage 0: every rank holds everything; DeepSpeed averages the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from shardkit import Engine, Strategy, Update
from shardkit.gradients import all_finite, gradients, total_norm, unscale
from shardkit_deepspeed._restore import Restore

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@final
class ReplicatedEngine(Engine):
    """The user's module and optimizer over DeepSpeed's engine without ZeRO.

    DeepSpeed's step would apply NaN, and decay parameters that got no gradient, so the step is made here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        library: Any,
        strategy: Strategy,
        bucket_size: int,
        restore: Restore,
    ) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._library = library
        # Kept here: once the session is open, it guards the optimizer's own.
        self._optimizer_step = optimizer.step
        self._params: list[nn.Parameter] = [value for group in optimizer.param_groups for value in group["params"]]
        listed = {id(value) for value in self._params}
        self._others = [value for value in model.parameters() if id(value) not in listed]
        self._max_norm = strategy.max_grad_norm
        self._want_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._bucket_size = bucket_size
        self._world_size = dist.get_world_size()
        self._restore = restore

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        loss.backward(gradient)
        if last and self._world_size > 1:
            self._average()
        if last and self.loss_scale != 1.0:
            unscale(gradients(self._params), self.loss_scale)

    def _average(self) -> None:
        absent: list[tuple[int, nn.Parameter]] = []
        held: list[Tensor] = []
        for index, value in enumerate(self._params):
            if value.grad is None:
                absent.append((index, value))
                value.grad = torch.zeros_like(value)
            elif value.grad.is_sparse:
                # Other ranks may have a dense one, or none.
                value.grad = value.grad.to_dense()
            held.append(value.grad)
        # It travels with the gradients: which of them are anybody's at all.
        present = torch.ones(len(self._params), dtype=held[0].dtype, device=held[0].device)
        for index, _ in absent:
            present[index] = 0
        self._library._reduce_non_expert_gradients([*held, present], self._bucket_size)
        if absent:
            anywhere = present.tolist()
            for index, value in absent:
                if not anywhere[index]:
                    value.grad = None

    def step(self) -> Update:
        trained = [value for value in self._params if value.grad is not None]
        averaged = gradients(trained)
        norm = None
        if self._want_norm:
            total = total_norm(averaged)
            norm = total.item()
            applied = norm - norm == 0.0
            if applied and self._max_norm is not None:
                clip_grads_with_norm_(trained, self._max_norm, total)
        else:
            applied = all_finite(averaged)
        if applied:
            self._optimizer_step()
        self._drop_gradients()
        return Update(applied, norm)

    def _drop_gradients(self) -> None:
        for value in self._params:
            value.grad = None
        for value in self._others:
            value.grad = None

    def full_gradients(self) -> dict[str, Tensor]:
        return {
            name: value.grad.detach().cpu().clone()
            for name, value in self.model.named_parameters()
            if value.grad is not None
        }

    def restart(self) -> None:
        self._drop_gradients()

    def close(self) -> None:
        self._drop_gradients()
        self._library.destroy()
        self._restore.undo()
