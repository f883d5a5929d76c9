"""What only the DDP backend has: its reducer, driven from backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from shardkit.testing import run
from shardkit.testing.cases._models import W, assert_close, batch, mlp, sgd, step, train, train_alone
from shardkit.testing.cases.public import Checkpointed


class Branches(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = W(1), W(1)

    def forward(self, x: float, names: str) -> Tensor:
        return torch.stack([getattr(self, name)([x]) for name in names]).sum()


def counted() -> list[int]:
    """Return how many all-reduces of gradients each micro-step made."""
    counts: list[int] = []
    calls: list[Any] = []
    reduce = dist.all_reduce
    model = mlp()
    with shardkit.prepare(model, sgd(model), "ddp:accumulate=3") as session:

        def hook(state: Any, bucket: Any) -> Any:
            calls.append(bucket)
            reduce(bucket.buffer())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer() / 2)
            return future

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
        for micro in range(9):
            if micro == 5:
                # It averages the first window, too, and is built at its end.
                reducer: Any = session._engine._reducer  # type: ignore[attr-defined]
                reducer.wrapper.register_comm_hook(None, hook)
            step(session, session.model(batch(0, micro)).square().mean())
            counts.append(len(calls))
    return counts


def test_a_window_makes_one_all_reduce_at_its_end() -> None:
    assert run(counted)[0] == [0, 0, 0, 0, 0, 1, 1, 1, 2]


def unused() -> list[dict[str, Tensor]]:
    """Train parameters that no rank, one rank, or one micro-batch uses."""
    found = []
    decayed = {"lr": 0.1, "weight_decay": 0.5}
    for windows in ([["a", "a"]], [["a", "ab"]], [["ab", "a"], ["a", "a"]], [["a", "b"]]):
        model = Branches()
        fields = f"ddp:accumulate={len(windows)}"
        with shardkit.prepare(model, torch.optim.AdamW(model.parameters(), **decayed), fields) as session:
            for ranks in windows:
                step(session, session.model(1.0, ranks[session.rank]))
            found.append(session.full_weights())
    return found


def test_a_parameter_that_some_micro_batch_of_some_rank_uses_is_right_and_an_unused_one_is_left_alone() -> None:
    first, second = run(unused)
    # AdamW's first step moves a parameter by lr, whatever its gradient, after a decay of lr x 0.5.
    moved = torch.tensor([1 * (1 - 0.05) - 0.1])
    for ranks in (first, second):
        for index, weights in enumerate(ranks):
            assert_close(weights["a.w"], moved)
            assert_close(weights["b.w"], torch.ones(1) if index == 0 else moved)


def thawed() -> dict[str, Tensor]:
    model = mlp()
    model[0].requires_grad_(False)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        train(session, steps=1)
        model[0].requires_grad_(True)
        train(session, steps=1, first=1)
        model[2].requires_grad_(False)
        return train(session, steps=1, first=2)


def test_parameters_thawed_and_frozen_in_mid_run_train_as_in_one_process() -> None:
    reference = mlp()
    optimizer = sgd(reference)
    for index, (frozen, layer) in enumerate(((True, 0), (False, 0), (True, 2))):
        reference[layer].requires_grad_(not frozen)
        optimizer.zero_grad()
        reference(torch.cat([batch(index, 0), batch(index, 1)])).square().mean().backward()
        optimizer.step()
    for found in run(thawed):
        assert_close(found, dict(reference.state_dict()))


def without_overlap() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Checkpointed(reentrant=True, unused=True)
    with shardkit.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), "ddp:overlap=false") as session:
        step(session, session.model(session.rank + 1))
        reentrant = session.full_weights()
    plain = mlp()
    with shardkit.prepare(
        plain, torch.optim.Adam(plain.parameters(), lr=1e-2), "ddp:overlap=off,accumulate=2"
    ) as session:
        return reentrant, train(session, steps=4)


def test_averaging_after_the_pass_is_right_for_reentrant_checkpointing_and_for_all_else() -> None:
    reference = mlp()
    expected = train_alone(reference, torch.optim.Adam(reference.parameters(), lr=1e-2), steps=4, parts=4)
    for reentrant, plain in run(without_overlap):
        assert_close(reentrant["layer.w"], torch.tensor([1 * (1 - 0.1 * 0.01) - 0.1]))
        assert_close(reentrant["unused.w"], torch.ones(1))
        assert_close(plain, expected, 2e-6)


@pytest.mark.parametrize("options", ["bucket_cap_mb=0.0001", "gradient_as_bucket_view=false"])
def test_options_change_no_result(options: str) -> None:
    reference = mlp()
    expected = train_alone(reference, sgd(reference), steps=3, parts=2)

    def trained() -> dict[str, Tensor]:
        model = mlp()
        with shardkit.prepare(model, sgd(model), f"ddp:{options}") as session:
            return train(session, steps=3)

    for found in run(trained):
        assert_close(found, expected)
