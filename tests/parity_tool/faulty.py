"""A backend that does one thing wrong, without a word of it in what it tells of itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import shardkit
from shardkit import Backend, Engine, Strategy, Update, Variant, hookimpl

FACTORS = {
    "times W": 2.0,
    "over W": 1 / 2,
    "times sqrt W": 2**0.5,
    "over sqrt W": 2**-0.5,
    "times M": 3.0,
    "over M": 1 / 3,
    "times W M": 6.0,
    "times 1.7": 1.7,
}
"""What averaged gradients are multiplied by, before they are seen."""

HIDDEN: dict[str, dict[str, Any]] = {
    "no momentum": {"momentum": 0.0},
    "other betas": {"betas": (0.9, 0.95)},
    "other eps": {"eps": 1e-3},
    "no decay": {"weight_decay": 0.0},
}
"""Settings of the optimizer that truly steps, where the one that is shown has others."""


class FaultyEngine(Engine):
    """Replicated training in a few lines, with one fault."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, fault: str) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._max_norm = strategy.max_grad_norm
        self._fault = fault
        self._steps = 0
        self._true: Optimizer | None = None
        if fault in HIDDEN or fault == "L2 decay":
            groups = [
                {
                    name: value
                    for name, value in group.items()
                    if name in ("params", "lr", "betas", "eps", "weight_decay", "momentum")
                }
                | HIDDEN.get(fault, {})
                for group in optimizer.param_groups
            ]
            made = torch.optim.Adam if fault == "L2 decay" else type(optimizer)
            self._true = made(groups)
        self._step = (self._true or optimizer).step
        if fault == "freezes":
            model.inner.weight.requires_grad_(False)  # type: ignore[union-attr, operator]

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        loss.backward(gradient)
        if not last:
            return
        for name, value in self.model.named_parameters():
            if value.grad is None:
                continue
            if self._fault == "bf16 gradients":
                value.grad = value.grad.bfloat16().float()
            if not (self._fault == "local" and name == "inner.weight"):
                dist.all_reduce(value.grad)
                value.grad /= dist.get_world_size()
            value.grad *= FACTORS.get(self._fault, 1.0)
            if self._fault == "times W from step 4" and self._steps >= 3:
                value.grad *= 2.0
            if self._fault == "inner times W" and name.startswith("inner"):
                value.grad *= 2.0
            if self._fault == "masked":
                value.grad *= (torch.arange(value.numel()).view_as(value) % 3 != 0).float()
        if self._fault.startswith("race ") and self._steps == 1:
            # A race that comes out in a way of its own each time.
            self.model.inner.weight.grad += float(self._fault.removeprefix("race "))  # type: ignore[union-attr, operator]

    def step(self) -> Update:
        max_norm = 0.05 if self._fault == "clips" else None if self._fault == "does not clip" else self._max_norm
        norm = clip_grad_norm_(self.model.parameters(), max_norm or torch.inf).item()
        self._steps += 1
        if self._fault == "skips" and self._steps == 3:
            self.model.zero_grad()
            return Update(applied=False, grad_norm=norm)
        kept = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        if self._fault == "zeros":
            for value in self.model.parameters():
                if value.requires_grad and value.grad is None:
                    value.grad = torch.zeros_like(value)
        if self._fault == "scaled in the step":
            for value in self.model.parameters():
                if value.grad is not None:
                    value.grad *= 2.0
        if self._true is not None:
            for group, shown in zip(self._true.param_groups, self.optimizer.param_groups, strict=True):
                group["lr"] = shown["lr"]
        self._step()
        with torch.no_grad():
            if self._fault == "stale" or (self._fault == "stale on rank 1" and dist.get_rank() == 1):
                self.model.inner.weight.copy_(kept["inner.weight"])  # type: ignore[union-attr, operator]
            if self._fault == "frozen decays":
                self.model.frozen.weight.mul_(1 - 1e-2 * 0.1)  # type: ignore[union-attr, operator]
        self.model.zero_grad()
        return Update(applied=True, grad_norm=norm)

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: value.grad.clone() for name, value in self.model.named_parameters() if value.grad is not None}


class FaultyPlugin:
    """A backend named ``faulty``, with the fault that is set when a session is prepared."""

    fault = ""

    @hookimpl
    def shardkit_describe(self) -> Backend:
        return Backend(name="faulty", summary="wrong on purpose", variants=(Variant(strategy="faulty", summary=""),))

    @hookimpl
    def shardkit_prepare(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> Engine:
        return FaultyEngine(model, optimizer, strategy, self.fault)


def register() -> FaultyPlugin:
    plugin = FaultyPlugin()
    shardkit.register(plugin, "faulty")
    return plugin
