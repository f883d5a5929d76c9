"""The tiny models of the cases, and how a case prepares them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Backend, Session, Strategy


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Prepares under the strategy of a text; ``folder`` is the case's own, the same on every rank."""

    text: str
    folder: Path

    def __call__(self, model: nn.Module, optimizer: Any, **fields: Any) -> Session:
        strategy = dataclasses.replace(Strategy.parse(self.text), **fields)
        if strategy.precision not in self.backend.precisions:
            # That it is refused is a test of its own.
            pytest.skip(f"backend {strategy.backend!r} doesn't declare precision {strategy.precision!r}")
        return shardkit.prepare(model, optimizer, strategy)

    @property
    def backend(self) -> Backend:
        return shardkit.backends()[Strategy.parse(self.text).backend]

    @property
    def shards(self) -> frozenset[str]:
        """What the strategy's variant declares to be split over the ranks."""
        return next((one.shards for one in self.backend.variants if one.strategy == self.text), frozenset())


def installed() -> dict[str, Backend]:
    """Return the backends whose libraries are there, by name."""
    found = shardkit.backends()
    return {name: one for name, one in found.items() if one.library is None or find_spec(one.library) is not None}


class W(nn.Module):
    """One parameter ``w = [value]``; ``forward(x) = (w * x).sum()``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, x: Any) -> Tensor:
        return (self.w * torch.as_tensor(x, dtype=self.w.dtype)).sum()


class Two(nn.Module):
    """Two parameters ``a`` and ``b``; ``forward(x) = (3a + 4b) x``, so that the gradient is (3x, 4x)."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([float(a)]))
        self.b = nn.Parameter(torch.tensor([float(b)]))

    def forward(self, x: float) -> Tensor:
        return ((3 * self.a + 4 * self.b) * x).sum()


def mlp(seed: int = 0, sizes: tuple[int, ...] = (8, 16, 8)) -> nn.Sequential:
    """Return a small multi-layer perceptron with the weights of a seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, part: int, rows: int = 4, width: int = 8) -> Tensor:
    """Return the rows of one micro-batch: the same for the same step and part, on whatever rank."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + part))


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    """Return SGD over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, parts: int, max_norm: float | None = None
) -> dict[str, Tensor]:
    """Return the weights that plain torch reaches in one process, each step on the mean of ``parts`` micro-batches."""
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.cat([batch(step, part) for part in range(parts)])
        model(rows).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(session: Session, steps: int, first: int = 0) -> dict[str, Tensor]:
    """Return the weights that the session reaches on the same global batches."""
    accumulate = session.strategy.accumulate
    for step in range(first, first + steps):
        for micro in range(accumulate):
            loss = session.model(batch(step, micro * session.world_size + session.rank)).square().mean()
            session.backward(loss)
            assert session.step() == (micro + 1 == accumulate)
    return session.full_weights()


def same_as_alone(
    prepare: Prepare,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module, int, int], Tensor],
    steps: int = 3,
    tolerance: float = 2e-6,
    change: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
    **fields: Any,
) -> dict[str, Tensor]:
    """Return the weights that a session reaches, once they are those of one process on the whole global batch.

    ``loss(model, step, part)`` is the loss of a part of the batch: micro-batch times world size plus rank.
    ``change(model, optimizer, step)`` is done before each step. Weights are compared after every step.
    """
    model, optimizer = build()
    other, plain = build()
    with prepare(model, optimizer, **fields) as session:
        parts = session.strategy.accumulate * session.world_size
        for index in range(steps):
            if change is not None:
                change(other, plain, index)
                change(session.model, session.optimizer, index)
            plain.zero_grad()
            for part in range(parts):
                (loss(other, index, part) / parts).backward()
            if session.strategy.max_grad_norm is not None:
                given = [value for group in plain.param_groups for value in group["params"]]
                nn.utils.clip_grad_norm_(given, session.strategy.max_grad_norm)
            plain.step()
            for micro in range(session.strategy.accumulate):
                session.backward(loss(session.model, index, micro * session.world_size + session.rank))
                session.step()
            weights = session.full_weights()
            try:
                assert_close(weights, dict(other.state_dict()), tolerance)
            except AssertionError as error:
                error.add_note(f"after step {index + 1}")
                raise
    return weights


def step(session: Session, loss: Tensor) -> bool:
    """Do one micro-step."""
    session.backward(loss)
    return session.step()


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Raise unless two tensors, or mappings of tensors, agree within an absolute and relative tolerance."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    else:
        actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
        torch.testing.assert_close(actual, expected.to(actual), rtol=tolerance, atol=tolerance)


Loss = Callable[[Any, int, int], Tensor]
"""The loss of a module at a step on one part of the global batch."""


def alone(model: nn.Module, loss: Loss, steps: int = 2, parts: int = 2, lr: float = 0.1) -> dict[str, Tensor]:
    """Return the weights that plain SGD reaches in one process on the mean over all parts."""
    optimizer = sgd(model, lr)
    for index in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, index, part) for part in range(parts)) / parts).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def together(session: Session, loss: Loss, steps: int = 2) -> dict[str, Tensor]:
    """Return the weights that the session reaches on the same parts."""
    for index in range(steps):
        for micro in range(session.strategy.accumulate):
            step(session, loss(session.model, index, micro * session.world_size + session.rank))
    return session.full_weights()


def assert_same_as_alone(
    prepare: Prepare, build: Callable[[], nn.Module], loss: Loss, tolerance: float = 1e-6, **fields: Any
) -> None:
    """Raise unless two steps of SGD under the strategy give the weights of one process."""
    expected = alone(build(), loss, parts=2 * fields.get("accumulate", 1))
    model = build()
    with prepare(model, sgd(model), **fields) as session:
        assert_close(together(session, loss), expected, tolerance)


def adamw(given: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW whose decay shows whether a parameter without a gradient was left alone."""
    return torch.optim.AdamW(given, lr=1e-2, weight_decay=0.3, **settings)


def heavy(given: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return SGD whose momentum shows whether a gradient was none or zero."""
    return torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, **settings)


def mean_square(model: nn.Module, index: int, part: int) -> Tensor:
    return model(batch(index, part)).square().mean()
