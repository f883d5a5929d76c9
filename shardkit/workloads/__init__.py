"""Workloads: one idea of something to train, for the comparison, the parity suite and the benchmarks.

A workload is a named function that returns a :class:`Workload`. The built-in ones are in the modules of this package; a
user's own is a Python file with such a function. Its arguments, if it has some, have defaults: they are settings of the
workload, ``NAME:key=value,key=value``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Workload:
    """Something to train.

    ``loss(model, batch)`` returns the mean loss over a batch, a scalar. ``batches(size)`` returns an endless iterator
    over batches of ``size`` samples, the same ones each time it is called; of W ranks, rank r trains on the batches r,
    r + W, r + 2W, ... The function that makes a workload seeds its own generators, so that every call gives the same
    weights.

    ``generate(model, batch)`` is how the model is evaluated where that is not by its loss: it writes an answer to each
    sample of the batch, calling the model equally often whatever the samples are, for sharded weights are gathered by
    all ranks together. ``tokens(batch)`` is how many tokens a batch has, for tokens per second.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Callable[[int], Iterator[Any]]
    generate: Callable[[nn.Module, Any], Any] | None = None
    tokens: Callable[[Any], int] | None = None


def names() -> list[str]:
    """Return the names of the built-in workloads; imports none."""
    from shardkit.workloads import _find

    return _find.names()


def load(text: str) -> Workload:
    """Return the workload that a built-in name or ``FILE.py[:function]`` stands for, newly made.

    Settings may follow, as in ``"t5-small:source=64,label_smoothing=0.1"``.

    Raises:
        InputError: there is no such name, file, function or setting, or the function returns something else.
    """
    from shardkit.workloads import _find

    return _find.function(text)()
