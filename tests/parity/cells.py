"""The cells of the suite: what is trained, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from .models import MODELS, Model

STEPS = 3
"""Optimizer steps in a cell: momentum and Adam's averages show from the second on, what leaks out of a step too."""

MAX_GRAD_NORM = 0.7
"""The norm that clipped cells clip to: every gradient's is at least 1.5 times as large, and no default is equal."""


@dataclass(frozen=True)
class Cell:
    """One short training run."""

    model: str
    optimizer: str
    accumulate: int
    clipped: bool

    def __str__(self) -> str:
        clipping = "clipped" if self.clipped else "unclipped"
        return f"{self.model}-{self.optimizer}-accumulate={self.accumulate}-{clipping}"

    @property
    def workload(self) -> Model:
        return MODELS[self.model]

    @property
    def max_grad_norm(self) -> float | None:
        return MAX_GRAD_NORM if self.clipped else None

    def build_optimizer(self, module: nn.Module) -> Optimizer:
        return OPTIMIZERS[self.optimizer](module)


@dataclass(frozen=True)
class Trace:
    """What a run was like.

    ``losses[step]`` holds the loss of each micro-batch of one rank, or the one of the global batch. Gradients are those
    before clipping; weights are those at the end, buffers included. ``evaluations`` holds the loss of
    the first step's data at the end, where asked for.
    """

    losses: list[list[float]]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    evaluations: list[float]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.03, momentum=0.9)


def adamw(module: nn.Module) -> Optimizer:
    """Return AdamW with decay on matrices only, in two groups that interleave.

    Where a gradient is far below ``eps``, Adam's first steps follow lr * g / eps: with the usual eps of 1e-8 a gradient
    of nothing but round-off, such as that of an attention's key bias, moves a weight by as much as lr, in a direction
    that the order of a sum decides. With 1e-3, some hundredth of a typical gradient here, round-off stays round-off.
    """
    matrices = [value for value in module.parameters() if value.dim() > 1]
    vectors = [value for value in module.parameters() if value.dim() <= 1]
    groups = [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"params": vectors, "lr": 3e-3, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), eps=1e-3)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def cells(world_size: int) -> list[Cell]:
    """Return all cells that run at a world size."""
    return [
        Cell(model.name, optimizer, accumulate, clipped)
        for model in MODELS.values()
        if world_size in model.world_sizes
        for optimizer in OPTIMIZERS
        for accumulate in (1, 3)
        for clipped in (False, True)
    ]


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: value.detach().clone() for name, value in tensors.items()}
