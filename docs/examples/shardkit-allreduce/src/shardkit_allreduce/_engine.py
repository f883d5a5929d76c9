"""The engine: whole weights, gradients and optimizer state on every rank, and an all-reduce after each window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from shardkit import Engine, Strategy, Update
from shardkit.errors import UnsupportedError
from shardkit.gradients import all_finite, gradients, total_norm, unscale
from torch.nn.utils import clip_grads_with_norm_

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_allreduce import Options


@final
class AllreduceEngine(Engine):
    """The user's module and optimizer. A rank's gradients are its own until the window's last backward."""

    optimizer: Optimizer

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: Options) -> None:
        self.model = model
        self.optimizer = optimizer
        # Kept here: once the session is open, the optimizer's own ``step`` is the session's to refuse.
        self._optimizer_step = optimizer.step
        self._parameters = dict(model.named_parameters())
        self._max_norm = strategy.max_grad_norm
        self._wants_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._bucket_bytes = options.bucket_mb * 2**20

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        # From ``gradient``: it holds what this micro-batch counts, and is NaN where the loss isn't finite.
        loss.backward(gradient)
        if last:
            if dist.get_world_size() > 1:
                self._average()
            unscale(gradients(self._parameters.values()), self.loss_scale)

    def step(self) -> Update:
        held = [value for group in self.optimizer.param_groups for value in group["params"]]
        trained = gradients(held)
        norm = None
        # The gradients are averaged: what this rank sees, all see, and all decide the same.
        if self._wants_norm:
            total = total_norm(trained)
            norm = total.item()
            finite = norm - norm == 0.0
            if finite and self._max_norm is not None:
                clip_grads_with_norm_([value for value in held if value.grad is not None], self._max_norm, total)
        else:
            finite = all_finite(trained)
        if finite:
            self._optimizer_step()
        self.close()
        return Update(finite, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        found = {name: value.grad for name, value in self._parameters.items()}
        return {name: value.detach().cpu().clone() for name, value in found.items() if value is not None}

    def close(self) -> None:
        for value in self._parameters.values():
            # To None, not to zeros: an optimizer leaves alone what has no gradient.
            value.grad = None

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients over the ranks. Collective."""
        for bucket in self._buckets():
            # A rank without a gradient that another one has counts as zero.
            parts = [torch.zeros_like(value) if value.grad is None else value.grad for value in bucket]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for value, part in zip(bucket, flat.split([part.numel() for part in parts]), strict=True):
                if value.grad is None:
                    value.grad = torch.empty_like(value)
                value.grad.copy_(part.view_as(value))

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Yield the parameters that any rank has a gradient of, a bucket of one dtype at a time. Collective."""
        parameters = list(self._parameters.values())
        # 0 without a gradient, 1 with one, 2 with a sparse one; the most of all ranks.
        kinds = [0 if value.grad is None else 1 + value.grad.is_sparse for value in parameters]
        told = torch.tensor(kinds, device=parameters[0].device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found = told.tolist()
        if 2 in found:
            # Every rank knows, so that every rank raises, and none waits in the next all-reduce.
            raise UnsupportedError(
                f"backend 'allreduce' can't average the sparse gradient of {list(self._parameters)[found.index(2)]!r}: "
                "give its module sparse=False, or use the strategy 'ddp'"
            )
        bucket: list[Tensor] = []
        for value in (value for value, kind in zip(parameters, found, strict=True) if kind):
            size = value.nbytes + sum(other.nbytes for other in bucket)
            if bucket and (bucket[0].dtype != value.dtype or size > self._bucket_bytes):
                yield bucket
                bucket = []
            bucket.append(value)
        if bucket:
            yield bucket
