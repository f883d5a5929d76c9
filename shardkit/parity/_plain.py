"""Torch's own DistributedDataParallel as its documentation has it: the baseline that every backend is held to.

It stands outside of all plugins, so that none is judged by itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardkit._backend import Backend, Variant
from shardkit._engine import Engine, Update
from shardkit._hookimpl import hookimpl

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit._strategy import Strategy

NAME = "plain-torch"


@final
class PlainEngine(Engine):
    """The user's module in torch's wrapper, which is what is called."""

    lockstep = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        self._module = model
        several = dist.get_world_size() > 1
        # A model may leave parameters out, which torch asks to be told.
        self._ddp = DistributedDataParallel(model, find_unused_parameters=True) if several else None
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._step = optimizer.step
        self._accumulate = strategy.accumulate
        self._max_norm = strategy.max_grad_norm
        self._pass = 0

    def called(self) -> nn.Module:
        """Return what a loop over plain torch calls."""
        return self._module if self._ddp is None else self._ddp

    def micro_batch(self) -> Any:
        """Return the context of the next micro-batch, forward and backward: gradients travel in the last alone."""
        self._pass += 1
        last = self._pass % self._accumulate == 0
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        (loss / self._accumulate).backward()

    def step(self) -> Update:
        norm = None
        if self._max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._max_norm))
        self._step()
        self._module.zero_grad(set_to_none=True)
        return Update(True, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        held = {name: value.grad for name, value in self._module.named_parameters()}
        return {name: value.detach().cpu().clone() for name, value in held.items() if value is not None}


class Plugin:
    """The hooks of a backend that is registered in the ranks of a baseline, and nowhere else."""

    @hookimpl
    def shardkit_describe(self) -> Backend:
        return Backend(
            name=NAME,
            summary="torch's own DistributedDataParallel",
            variants=(Variant(strategy=NAME, summary="torch's own DistributedDataParallel"),),
            devices=frozenset({"cpu", "cuda"}),
            precisions=frozenset({"fp32", "bf16", "fp16"}),
        )

    @hookimpl
    def shardkit_prepare(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: Any) -> Engine:
        return PlainEngine(model, optimizer, strategy)
