"""How far plain torch in float32 is from float64, on the cells of this suite: what the tolerances rest on.

``python -m tests.parity.roundoff`` prints it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

import torch
import transformers
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from . import compare
from .cells import Cell, cells
from .models import MODELS
from .reference import train


@dataclass(frozen=True)
class Distances:
    """The largest distances over a model's cells, relative as in ``compare``."""

    loss: float = 0
    grad_norm: float = 0
    gradient: float = 0
    weight: float = 0

    def __or__(self, other: Distances) -> Distances:
        return Distances(*map(max, asdict(self).values(), asdict(other).values()))


@cache
def measured(model: str) -> Distances:
    """Return how far float32 is from float64, over all optimizers, clippings and ways to split the batch."""
    total = Distances()
    for cell, world_size in _ways(model):
        exact = train(cell, world_size, exact_module(cell.workload.build(0)), whole_batch=False, dtype=torch.float64)
        whole_batch = [False, True] if cell.workload.whole_batch else [False]
        for whole in whole_batch:
            single = train(cell, world_size, cell.workload.build(0), whole_batch=whole)
            total |= Distances(
                compare.worst(compare.losses([single], exact)).relative,
                compare.worst(compare.grad_norms([single], exact)).relative,
                compare.worst(compare.gradients([single], exact)).relative,
                compare.worst(compare.weights([single], exact)).relative,
            )
    return total


def _ways(model: str) -> Iterator[tuple[Cell, int]]:
    for world_size in MODELS[model].world_sizes:
        yield from ((cell, world_size) for cell in cells(world_size) if cell.model == model)


def exact_module(module: nn.Module) -> nn.Module:
    """Return the module with T5's norms, which compute in float32 whatever they are given, replaced by torch's."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, T5LayerNorm):
                norm = nn.RMSNorm(child.weight.shape[0], child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return module


def main() -> None:
    """Print the distances and what they were measured on."""
    print(
        f"float32 from float64 with torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}"
    )
    print(f"{'model':<12}{'loss':>10}{'norm':>10}{'gradient':>10}{'weight':>10}")
    for model in MODELS:
        print(f"{model:<12}" + "".join(f"{value:>10.1e}" for value in asdict(measured(model)).values()))


if __name__ == "__main__":
    main()
