"""One model and its optimizer under FairScale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import UnsupportedError
from shardkit.gradients import gradients, unscale
from shardkit.parameters import sharing
from shardkit_fairscale._reduce import Reducer, ReplicatedReducer, ShardedReducer
from shardkit_fairscale._shard import Shards
from shardkit_fairscale._window import Agreement, Window, alone

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_fairscale import FairScaleOptions


class FairScaleEngine(Engine):
    """OSS with ShardedDDP, or with DistributedDataParallel."""

    optimizer: Optimizer

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FairScaleOptions) -> None:
        _check_dense(model)
        _check_apart(model)
        self.model = model
        self.optimizer = optimizer
        self._clip = strategy.max_grad_norm
        self._wants_norm = self._clip is not None or strategy.track_grad_norm
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._parameters: list[Tensor] = list(self._names)
        self._window: Window | None = None
        # A window starts from no gradients.
        self._drop()
        self._shard = Shards(model, optimizer)
        self._rank = dist.get_rank()
        self._reducer: Reducer | None = None
        # One process has nothing to average.
        if dist.get_world_size() > 1:
            self._reducer = (
                ShardedReducer(model, self._shard, self._names, options.reduce_buffer_size)
                if options.shard == "gradients"
                else ReplicatedReducer(model, self._names, options.bucket_cap_mb)
            )
            self.whole_gradients = not self._reducer.sharded
            self._agreement = Agreement(model, self._shard, self._reducer, wants_norm=self._wants_norm)

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        if last and self._reducer is not None:
            self._reducer.backward(loss, gradient)
        else:
            loss.backward(gradient)
        if last and self.loss_scale != 1.0:
            unscale(gradients(self._parameters), self.loss_scale)

    def step(self) -> Update:
        window = self._settle()
        norm = None if window.norm is None else window.norm.item()
        if window.finite:
            if self._clip is not None and window.norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._shard.owned, self._clip, window.norm)
            self._shard.update(window.beyond)
        if self._reducer is not None:
            self._reducer.drop()
        self._drop()
        return Update(applied=window.finite, grad_norm=norm)

    def full_gradients(self) -> dict[str, Tensor]:
        whole_gradients = {}
        for parameter in self._settle().used:
            owner = self._shard.owner(parameter)
            mine = parameter.grad if owner == self._rank else None
            whole = torch.empty_like(parameter) if mine is None else mine
            if self._reducer is not None:
                dist.broadcast(whole.detach(), src=owner)
            whole_gradients[self._names[parameter]] = whole.detach().cpu().clone()
        return whole_gradients

    def gradient_shards(self) -> list[Shard]:
        used = self._settle().used
        mine = [value for value in used if self._shard.owner(value) == self._rank]
        return [Shard(self._names[value], 0, value.grad) for value in mine if value.grad is not None]

    @property
    def stepper(self) -> Optimizer:
        return self._shard.inner

    def state_shards(self) -> list[Shard]:
        return [Shard(self._names[value], 0, value) for value in self._shard.owned]

    def restart(self) -> None:
        self._drop()
        if self._reducer is not None:
            # A backward that failed left it in the middle of its work.
            self._reducer.refresh(self._reducer.schedule)

    def state_dict(self) -> dict[str, Any]:
        # In which order gradients travel decides which do so together, and so in which order they are added up.
        return {"order": None if self._reducer is None else self._agreement.learned()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._reducer is not None:
            self._agreement.learn(state["order"])

    def close(self) -> None:
        self._drop()
        if self._reducer is not None:
            self._reducer.close()
        self._shard.close()

    def _settle(self) -> Window:
        if self._window is None:
            if self._reducer is None:
                self._window = alone(self._parameters, self._shard.optimized, wants_norm=self._wants_norm)
            else:
                self._window = self._agreement.settle()
        return self._window

    def _drop(self) -> None:
        # To None, never to zeros: a parameter without a gradient must be left alone by the optimizer.
        for parameter in self._parameters:
            parameter.grad = None
        self._window = None


def _check_apart(model: nn.Module) -> None:
    pair = sharing(dict(model.named_parameters()))
    if pair is not None:
        raise UnsupportedError(
            f"backend 'fairscale' moves parameters into buffers of its own, and {pair[0]!r} and {pair[1]!r} share "
            "memory, which would part: make them one parameter, or use the strategy 'ddp'"
        )


def _check_dense(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if getattr(part, "sparse", False) is True and any(p.requires_grad for p in part.parameters(recurse=False)):
            place = f"{name or 'the module'!r} ({type(part).__name__})"
            raise UnsupportedError(
                f"backend 'fairscale' can't average the sparse gradients of {place}: give it sparse=False, or use "
                "the strategy 'ddp'"
            )
