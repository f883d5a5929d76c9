"""A small convolutional network with BatchNorm that tells apart noisy images of four patterns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardkit.workloads import Workload

CLASSES = 4
SIDE = 12


def workload() -> Workload:
    """Return a network of two convolutions, with SGD that has momentum.

    BatchNorm normalizes each micro-batch by itself, under every strategy and in the reference alike.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, batches)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield patterns under noise, and which of them each is."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
    while True:
        labels = torch.randint(CLASSES, (size,), generator=generator)
        yield patterns[labels] + torch.randn(size, 3, SIDE, SIDE, generator=generator), labels
