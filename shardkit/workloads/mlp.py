"""A multilayer perceptron that learns what another one of random weights computes: the quickest to train."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardkit.workloads import Workload


def workload() -> Workload:
    """Return a perceptron of three layers, with SGD that has momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), loss, batches)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normally distributed inputs and the teacher's answers to them."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(32, 8, generator=generator) / 32**0.5
    while True:
        inputs = torch.randn(size, 32, generator=generator)
        yield inputs, torch.tanh(inputs @ teacher)
