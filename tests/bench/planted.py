"""Workloads for the search of the largest batch: one of a known size, and ones that go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardkit import Workload

ROWS, WIDTH = 64, 4096
SAMPLE = ROWS * WIDTH * 4
"""Bytes of one activation of a sample: a MiB."""


class Layers(nn.Module):
    """One wide layer. Its training holds five activations of each sample at a time, in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.inner(inputs)).square().mean()


def of(loss: Callable[[nn.Module, Tensor], Tensor], size: int | None = None) -> Workload:
    """Return the workload with this loss, and batches of the size that is asked for unless it is fixed."""
    torch.manual_seed(0)
    model = Layers()

    def batches(asked: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(size or asked, ROWS, 64, generator=generator)

    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, batches)


def plain_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)  # type: ignore[no-any-return]


def sized() -> Workload:
    return of(plain_loss)


def ignores_the_size() -> Workload:
    return of(plain_loss, size=6)


def misshapen() -> Workload:
    return of(lambda model, batch: model(batch[:, :, 1:]))


def misshapen_from_three_on() -> Workload:
    return of(lambda model, batch: model(batch[:, :, 1:] if len(batch) > 2 else batch))


def vector_loss() -> Workload:
    return of(lambda model, batch: model(batch) * torch.ones(2))


def on_rank_one(action: Callable[[], Any]) -> Workload:
    """Return the workload of which rank 1 does something in its third step."""
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch.shape)
        if os.environ["RANK"] == "1" and len(seen) == 3:
            action()
        return plain_loss(model, batch)

    return of(loss)


def crashing() -> Workload:
    return on_rank_one(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def killed() -> Workload:
    return on_rank_one(lambda: os.kill(os.getpid(), signal.SIGKILL))


def leaving() -> Workload:
    return on_rank_one(lambda: os._exit(3))


def sleeping() -> Workload:
    return on_rank_one(sleep_long)


def sleep_long() -> None:
    time.sleep(600)


def says_out_of_memory() -> Workload:
    return on_rank_one(lambda: _raise(RuntimeError("CUDA out of memory: so it says")))


def says_it_could_not_allocate() -> Workload:
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    return on_rank_one(lambda: _raise(RuntimeError(text)))


def _raise(error: BaseException) -> None:
    raise error


def hungry_rank() -> Workload:
    """Rank 1 takes 40 MiB more than the other."""
    kept = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if os.environ["RANK"] == "1" and not kept:
            kept.append(torch.zeros(10 * 2**20))
        return plain_loss(model, batch)

    return of(loss)


def wrapping() -> Workload:
    """Raise another error where memory is short, as libraries do."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        try:
            return plain_loss(model, batch)
        except RuntimeError as error:
            raise ValueError("the layer failed") from error

    return of(loss)


def leaking() -> Workload:
    """Keep half a MiB of every step."""
    kept = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        kept.append(torch.zeros(2**17))
        return plain_loss(model, batch)

    return of(loss)
