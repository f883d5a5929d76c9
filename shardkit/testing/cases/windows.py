"""Windows: short ones, weighted ones, and ranks with different numbers of micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit import Session
from shardkit.errors import InputError, MismatchError, StateError
from shardkit.testing.cases._models import Prepare, W, assert_close, mlp, sgd
from shardkit.testing.cases._table import case


def train(session: Session, windows: Any, loss: Any = None) -> list[bool]:
    """Train over windows, and return what each step returned."""
    moved = []
    for window in windows:
        for batch in window:
            session.backward(session.model(batch) if loss is None else loss(session.model, batch))
        moved.append(session.step())
    return moved


@case(raw=False)
def a_short_last_window_is_divided_by_its_own_length(prepare: Prepare, rank: int) -> None:
    model = W(1)
    loader = [[[1.0], [2.0], [4.0]], [[3.0], [4.0], [6.0]]][rank]
    with prepare(model, sgd(model), accumulate=2) as session:
        assert train(session, session.windows(loader)) == [True, True]
        # The means of (1, 2, 3, 4) and of (4, 6).
        assert_close(session.full_weights()["w"], [1 - 0.1 * 2.5 - 0.1 * 5.0])


@case(raw=False)
def with_weights_a_step_is_the_sum_of_losses_over_the_sum_of_weights(prepare: Prepare, rank: int) -> None:
    model = W(1)
    # Sums over 1, 3 and 2, 4 tokens: (10 + 30 + 2 + 8) / 10, not the mean of the four means.
    loader = [[(10.0, 1), (30.0, 3)], [(2.0, 2), (8.0, 4)]][rank]
    with prepare(model, sgd(model), accumulate=2, track_grad_norm=True) as session:
        windows = session.windows(loader, weight=lambda item: item[1])
        assert train(session, windows, lambda module, item: module([item[0]])) == [True]
        assert session.grad_norm == pytest.approx(5.0, rel=1e-6)
        assert_close(session.full_weights()["w"], [0.5])


@case(raw=False)
def token_weights_give_the_step_of_one_process_over_all_tokens(prepare: Prepare, rank: int) -> None:
    numbers = torch.Generator().manual_seed(3)
    rows = [torch.randn(length, 8, generator=numbers) for length in (1, 5, 2, 7, 3, 4, 6)]
    reference, model = mlp(), mlp()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    # Windows of two micro-batches a rank: rows 0-3, then 4-6 with rank 1 one short.
    for members in ((0, 1, 2, 3), (4, 5, 6)):
        plain.zero_grad()
        together = torch.cat([rows[index] for index in members])
        reference(together).square().sum(1).mean().backward()
        plain.step()
    own = [rows[index] for index in ((0, 2, 4, 6), (1, 3, 5))[rank]]
    with prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), accumulate=2) as session:
        windows = session.windows(own, weight=lambda batch: torch.tensor(len(batch)))
        assert train(session, windows, lambda module, batch: module(batch).square().sum()) == [True, True]
        assert_close(session.full_weights(), dict(reference.state_dict()), 2e-6)


@case(raw=False)
def ranks_with_different_numbers_of_batches_end_together_and_use_each_once(prepare: Prepare, rank: int) -> None:
    for lengths in ((5, 3), (1, 4), (2, 3)):
        model = W(1)
        values = [[float(index + 1) for index in range(lengths[0])], [10.0 + index for index in range(lengths[1])]]
        expected = 1.0
        for first in range(0, max(lengths), 2):
            members = values[0][first : first + 2] + values[1][first : first + 2]
            expected -= 0.01 * sum(members) / len(members)
        with prepare(model, sgd(model, lr=0.01), accumulate=2) as session:
            used: list[float] = []
            for window in session.windows(values[rank]):
                for value in window:
                    filling = window.filling
                    session.backward(session.model([value]))
                    assert window.filling == filling
                    if not filling:
                        used.append(value)
                assert session.step()
            assert used == values[rank]
            assert session.steps == (max(lengths) + 1) // 2
            assert_close(session.full_weights()["w"], [expected])


@case(or_refused=True, raw=False)
def a_rank_without_any_batch_takes_part_in_every_step(prepare: Prepare, rank: int) -> None:
    model = W(1)
    loader: list[list[float]] = [[], [[2.0], [4.0], [6.0]]][rank]
    with prepare(model, sgd(model), accumulate=2) as session:
        assert train(session, session.windows(loader)) == [True, True]
        assert_close(session.full_weights()["w"], [1 - 0.3 - 0.6])


@case(raw=False)
def uneven_loaders_are_refused_when_asked_before_any_of_the_rest_is_used(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=2) as session:
        windows = session.windows([[1.0]] * (4, 3)[rank], uneven="refuse")
        with pytest.raises(MismatchError, match="rank 0: 2; rank 1: 1"):
            train(session, windows)
        assert session.steps == 1
        assert_close(session.full_weights()["w"], [0.9])
        assert train(session, session.windows([[1.0]] * 2, uneven="refuse")) == [True]


@case(raw=False)
def a_loader_that_fails_on_one_rank_fails_on_all(prepare: Prepare, rank: int) -> None:
    def loader() -> Iterator[list[float]]:
        yield [1.0]
        if rank == 1:
            raise OSError("no such shard")
        yield [1.0]

    model = W(1)
    with prepare(model, sgd(model)) as session:
        with pytest.raises(Exception, match="no such shard"):
            train(session, session.windows(loader()))
        assert session.steps == 1
        assert train(session, session.windows([[1.0]])) == [True]


@case(raw=False)
def bad_weights_are_refused_on_every_rank(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        for weight, words in ((-1.0, "at least 0, not -1"), (float("nan"), "not nan"), ("many", "not 'many'")):
            with pytest.raises(InputError, match=words):
                train(session, session.windows([[1.0]], weight=lambda _, w=weight: w if rank == 1 else 1.0))
        with pytest.raises(InputError, match="weights of this window are 0"):
            train(session, session.windows([[1.0]], weight=lambda _: 0.0))
        assert train(session, session.windows([[1.0]], weight=lambda _: float(rank))) == [True]
        assert_close(session.full_weights()["w"], [0.8])


@case(raw=False)
def a_window_left_before_its_step_is_refused(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=2) as session:
        windows = iter(session.windows([[1.0]] * 4))
        for batch in next(windows):
            session.backward(session.model(batch))
        with pytest.raises(StateError, match="before the step"):
            next(windows)
        assert session.step()
        assert_close(session.full_weights()["w"], [0.9])


@case(raw=False)
def a_pass_goes_on_from_a_checkpoint_with_the_order_that_was_drawn(prepare: Prepare, rank: int) -> None:
    rows = [torch.full((2, 8), float(index)) for index in range(10)]

    def loader() -> torch.utils.data.DataLoader[Tensor]:
        return torch.utils.data.DataLoader(rows, batch_size=None, shuffle=True)  # type: ignore[arg-type]

    def go_on(session: Session, windows: Any, stop: int | None = None) -> list[float]:
        seen: list[float] = []
        while windows.epoch < 2:
            for window in windows:
                for batch in window:
                    seen.append(batch[0, 0].item())
                    session.backward(session.model(batch / 10).square().mean())
                assert session.step()
                if session.steps == stop:
                    session.save(prepare.folder)
        return seen

    for stop in (2, 3, 5):
        model = mlp()
        with prepare(model, sgd(model), accumulate=2, seed=7) as session:
            whole = go_on(session, session.windows(loader()), stop)
            first = session.full_weights()
        assert sorted(whole[:10]) == sorted(whole[10:]) == [float(index) for index in range(10)]
        assert whole[:10] != whole[10:]
        other = mlp(seed=1)
        with prepare(other, sgd(other), accumulate=2) as session:
            session.load(prepare.folder)
            windows = session.windows(loader())
            assert (windows.epoch, windows.position) == (0, 2 * stop)
            assert go_on(session, windows) == whole[2 * stop :]
            second = session.full_weights()
        assert all(torch.equal(first[name], second[name]) for name in first)


@case(raw=False)
def windows_skip_and_scale_as_the_plain_loop_does_in_fp16(prepare: Prepare, rank: int) -> None:
    model = W(1)
    loader = [([[1.0], [2.0], [3.0]], [[3.0], [4.0]])[rank]] * 2
    with prepare(model, sgd(model), accumulate=3, precision="fp16", loss_scale=2.0**14) as session:
        moved = []
        for epoch, batches in enumerate(loader):
            for window in session.windows(batches):
                for batch in window:
                    loss = session.model(batch)
                    session.backward(loss * 1e37 if epoch == 0 and rank == 1 else loss)
                moved.append(session.step())
        assert moved == [False, True]
        assert session.scaler is not None
        assert session.scaler.scale == 2.0**13
        assert_close(session.full_weights()["w"], [1 - 0.1 * 13 / 5])


@case(raw=False)
def buffers_of_a_short_rank_are_those_of_rank_0(prepare: Prepare, rank: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).sum()

    model = Normed()
    loader = [torch.tensor([[0.0], [2.0]]) + 10 * rank] * (2, 1)[rank]
    with prepare(model, sgd(model)) as session:
        train(session, session.windows(loader))
        assert_close(session.full_weights()["norm.running_mean"], [0.19])


@case(raw=False)
def c90_values_of_ranks_with_different_counts_are_gathered_without_padding(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        for count, mean in ((9, 4.0), (1, 0.0), (8, 3.5), (10, 4.5)):
            own = torch.arange(float(count))[session.rank :: session.world_size]
            with session.evaluate() as module:
                values = torch.stack([module([value.item()]) for value in own]) if len(own) else own
            together = session.gather(values)
            assert together.shape == (count,)
            assert_close(together.mean(), mean)
        for wrong in (3, torch.tensor(1.0)):
            with pytest.raises(InputError, match="at least one dimension"):
                session.gather(wrong if rank == 1 else torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="differ in type"):
            session.gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32))


@case(raw=False)
def gradients_changed_by_hand_count_also_where_a_rank_had_no_batch(prepare: Prepare, rank: int) -> None:
    for short in (0, 1):
        model = W(1)
        loader = [[1.0], [2.0]] if rank != short else [[3.0]]
        with prepare(model, sgd(model)) as session:
            for window in session.windows(loader):
                for batch in window:
                    session.backward(session.model(batch))
                try:
                    for value in model.parameters():
                        if value.grad is not None:
                            value.grad.mul_(0.5)
                except StateError:
                    break  # in shards, and refused
                assert session.step()
            else:
                # Half of (1 + 3) / 2 and of 2.
                assert_close(session.full_weights()["w"], [0.8])


@case(raw=False)
def gradients_of_a_window_are_whole_where_a_rank_had_no_batch(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model)) as session:
        for window in session.windows([[1.0], [2.0]] if rank == 0 else [[3.0]]):
            for batch in window:
                session.backward(session.model(batch))
            assert_close(session.full_gradients()["w"], [2.0])
            session.step()
        assert_close(session.full_weights()["w"], [0.6])


@case(raw=False)
def micro_batches_taken_ahead_count_each_once(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), accumulate=2) as session:
        for window in session.windows([[1.0], [2.0]] if rank == 0 else [[3.0]]):
            for batch in list(window):
                session.backward(session.model(batch))
            assert session.step()
        assert_close(session.full_weights()["w"], [0.8])


@case(raw=False)
def a_loader_that_fails_at_its_start_on_one_rank_fails_on_all(prepare: Prepare, rank: int) -> None:
    class Loader:
        def __iter__(self) -> Iterator[list[float]]:
            if rank == 1:
                raise FileNotFoundError("shard-1.tar")
            return iter([[1.0]])

    model = W(1)
    with prepare(model, sgd(model)) as session, pytest.raises(Exception, match=r"shard-1\.tar"):
        train(session, session.windows(Loader()))


@case(raw=False)
def an_overflow_is_skipped_although_the_gradient_was_clamped_by_hand(prepare: Prepare, rank: int) -> None:
    model = W(1)
    with prepare(model, sgd(model), precision="fp16") as session:
        session.backward(session.model([1.0]) * (1e38 if rank == 1 else 1.0))
        # In shards it is refused.
        with contextlib.suppress(StateError):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert not session.step()
        assert session.step_was_skipped
        assert_close(session.full_weights()["w"], [1.0])
