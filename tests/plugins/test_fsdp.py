"""What is fsdp's alone: blocks, shards, guarded parameters. Each value is by hand or by plain torch in one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from shardkit import Strategy
from shardkit.errors import InputError, StateError, UnsupportedError
from shardkit.testing import run
from shardkit.testing.cases._models import assert_close, batch, mlp, sgd, step, train, train_alone

CHECKS: dict[str, Callable[[int], None]] = {}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    """Add a check that runs on two ranks, in one launch with the others."""
    CHECKS[function.__name__] = function
    return function


class Block(nn.Module):
    """A layer that looks which blocks hold whole weights while it runs."""

    def __init__(self, log: list[list[bool]], blocks: list[Block]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.log, self.blocks = log, [blocks]
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append([whole(block.linear.weight) for block in self.blocks[0]])
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.log: list[list[bool]] = []
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        made: list[Block] = []
        self.blocks = nn.ModuleList([Block(self.log, made) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(value: Tensor) -> bool:
    return type(value) is nn.Parameter and value.untyped_storage().nbytes() >= value.nbytes


def groups_of(session: Any) -> list[list[str]]:
    names = session._engine._names
    return [[names[id(held.value)] for held in group.fsdp_params] for group in session._engine._shards.groups]


@check
def the_users_parameters_and_module_stay_and_come_back(rank: int) -> None:
    model, bare = mlp(), mlp()
    before = list(model.parameters())
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        train(session, steps=2)
        assert session.model is model
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert [type(part) for part in model.modules()] == [type(part) for part in bare.modules()]
        assert model[0].weight.shape == (16, 8)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert {type(value) for value in model.parameters()} == {nn.Parameter}
    assert all(not vars(value) for value in model.parameters())
    for part, other in zip(model.modules(), bare.modules(), strict=True):
        assert {k: v for k, v in vars(part).items() if "hook" in k} == {
            k: v for k, v in vars(other).items() if "hook" in k
        }
        assert vars(part).keys() == vars(other).keys()
    assert_close(dict(model.state_dict()), train_alone(bare, sgd(bare), steps=2, parts=2))


@check
def one_block_is_whole_at_a_time(rank: int) -> None:
    model = Stack()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        assert [len(names) for names in groups_of(session)] == [2, 2, 2, 4]
        session.model(batch(0, rank)).sum()
        assert model.log == [[at == other for other in range(3)] for at in range(3)]
        session.backward(session.model(batch(0, rank)).square().mean())
        session.step()
        # Nothing whole stays.
        for held in session._engine._held:
            assert held.all_gather_outputs[0].untyped_storage().nbytes() == 0
        held = sum(held.local.numel() for held in session._engine._held)
        assert held * 2 == sum(value.numel() for value in model.parameters())


@check
def gradients_are_held_in_shards_until_the_step(rank: int) -> None:
    model = Stack()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        session.backward(session.model(batch(0, rank)).square().mean())
        engine: Any = session._engine
        assert sum(held.gradient.numel() for held in engine._held) * 2 == sum(v.numel() for v in model.parameters())
        session.step()
        assert all(held.gradient is None for held in engine._held)


@check
def blocks_are_as_the_option_says(rank: int) -> None:
    wanted = {"none": [10], "Block": [2, 2, 2, 4], "blocks.1": [2, 8], "stem|blocks.*.linear": [2, 2, 2, 2, 2]}
    for wrap, sizes in wanted.items():
        for stay in (None, True, False):
            model, reference = Stack(), Stack()
            strategy = Strategy("fsdp", options={"wrap": wrap, "reshard_after_forward": stay}, max_grad_norm=0.05)
            with shardkit.prepare(model, sgd(model), strategy) as session:
                assert sorted(map(len, groups_of(session))) == sorted(sizes), wrap
                assert_close(train(session, 2), train_alone(reference, sgd(reference), 2, 2, max_norm=0.05))
    model = Stack()
    with pytest.raises(InputError, match="'Blok' is neither the name nor the class"):
        shardkit.prepare(model, sgd(model), Strategy("fsdp", options={"wrap": "Blok"}))


class Shared(nn.Module):
    """Blocks of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.blocks[3].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@check
def blocks_that_share_a_parameter_are_left_to_what_holds_both(rank: int) -> None:
    model, reference = Shared(), Shared()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        assert sorted(map(sorted, groups_of(session))) == [
            ["blocks.0.bias", "blocks.0.weight"],
            ["blocks.1.bias", "blocks.1.weight", "blocks.3.bias"],
            ["blocks.2.bias", "blocks.2.weight"],
        ]
        assert_close(train(session, steps=3), train_alone(reference, sgd(reference), steps=3, parts=2))
    assert model.blocks[3].weight is model.blocks[1].weight


@check
def a_parameter_used_outside_of_its_module_counts(rank: int) -> None:
    def loss(model: Any, part: int) -> Tensor:
        penalty = sum(value.square().sum() for value in model.parameters())
        out = model(batch(0, part))
        early = (model.blocks[1].linear.weight * 2).sum() + model.head.weight.t()[0].sum()
        return out.square().mean() + 0.01 * penalty + 0.1 * early * out.mean()

    model, reference = Stack(), Stack()
    optimizer = sgd(reference)
    for _ in range(2):
        optimizer.zero_grad()
        ((loss(reference, 0) + loss(reference, 1)) / 2).backward()
        optimizer.step()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        for _ in range(2):
            step(session, loss(session.model, rank))
        assert_close(session.full_weights(), dict(reference.state_dict()), 2e-6)


@check
def a_step_after_an_evaluation_outside_of_any_pass_shows_in_the_next(rank: int) -> None:
    model, reference = Stack(), Stack()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        for index in range(3):
            session.backward(session.model(batch(index, rank)).square().mean())
            # What no block holds stays whole behind this.
            with torch.no_grad():
                session.model(batch(9, 9))
            session.step()
        assert_close(session.full_weights(), train_alone(reference, sgd(reference), steps=3, parts=2))
        with torch.no_grad():
            assert_close(session.model(batch(9, 9)), reference(batch(9, 9)).detach())


@check
def looks_at_shards_are_refused_with_advice(rank: int) -> None:
    model = mlp()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        looks: list[Callable[[], Any]] = [
            lambda: model[0].weight.cpu(),
            lambda: model[0].weight.detach().norm(),
            lambda: model[0].weight.data.clone(),
            lambda: model.state_dict(),
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model[0].weight),
        ]
        for look in looks:
            with pytest.raises(UnsupportedError, match=r"'fsdp'.*session\.full_weights\(\)"):
                look()
        with torch.no_grad(), pytest.raises(UnsupportedError, match="full_weights"):
            model[0].weight.norm()
        assert "in shards" in repr(model[0].weight)
        with session.evaluate():
            assert torch.equal(model[0].weight.cpu(), mlp()[0].weight)
            assert list(model.state_dict()) == list(mlp().state_dict())


@check
def what_cant_be_written_by_parts_is_refused(rank: int) -> None:
    model = mlp()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        with torch.no_grad():
            for write in (lambda: model[0].weight.normal_(), lambda: model[0].weight.__setitem__(0, 1.0)):
                with pytest.raises(UnsupportedError, match="load_state_dict"):
                    write()
        with pytest.raises(UnsupportedError, match="assign=True"):
            model.load_state_dict(mlp(1).state_dict(), assign=True)
        with pytest.raises(UnsupportedError, match=r"within session.evaluate\(\) is lost"), session.evaluate():
            model[0].weight.zero_()
        assert_close(session.full_weights(), dict(mlp().state_dict()), 0)
        # A whole tensor, of which each rank takes its own rows.
        model[0].weight.data = torch.full((16, 8), 0.5)
        model[0].bias.data.mul_(torch.arange(16.0))
        assert torch.equal(session.full_weights()["0.weight"], torch.full((16, 8), 0.5))
        assert torch.equal(session.full_weights()["0.bias"], mlp()[0].bias.detach() * torch.arange(16.0))


class Odd(nn.Module):
    """A block that does what it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.inner = nn.ModuleList([Inner(how), Inner("")])

    def forward(self, x: Tensor) -> Tensor:
        # What is back-propagated to needs the weight.
        out = self.inner[0](self.inner[1](x))
        out += 1
        return out


class Inner(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(8, 8)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "returns":
            return self.weight.view(-1)[:8]
        if self.how == "writes":
            with torch.no_grad():
                self.weight.mul_(0.5)
        out = torch.tanh(x) @ self.weight
        return out.t().t() if self.how == "view" else out


@check
def a_view_that_is_changed_in_place_is_right(rank: int) -> None:
    model, reference = Odd("view"), Odd("view")
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        assert_close(train(session, steps=2), train_alone(reference, sgd(reference), steps=2, parts=2))


@check
def a_module_that_returns_or_writes_its_own_parameter_is_refused(rank: int) -> None:
    for how, words in (("returns", "returns one of its own"), ("writes", "while its module ran is lost")):
        model = Odd(how)
        with shardkit.prepare(model, sgd(model), "fsdp") as session, pytest.raises(UnsupportedError, match=words):
            step(session, session.model(batch(0, rank)).sum())


@check
def host_memory_changes_no_bit(rank: int) -> None:
    found = []
    for text in ("fsdp", "fsdp:offload=cpu"):
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with shardkit.prepare(model, optimizer, text) as session:
            found.append(train(session, steps=3))
    assert_close(found[0], found[1], 0)


class Phases(nn.Module):
    """A complex parameter in a module of its own, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.ParameterDict({"c": nn.Parameter(torch.tensor([1.0 + 2.0j, 0.5 - 1.0j, 1j]))})
        self.inner = Turn()
        self.scale = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x[0, :3] + 1j).abs().square() * self.scale * self.table).sum()


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor([1.0 + 2.0j, 0.5 - 1.0j, 1j]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.c


class Recurrent(nn.Module):
    """A layer that keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(8, 8, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.unsqueeze(1))[0]
        return out


@check
def recurrent_layers_train(rank: int) -> None:
    model, reference = Recurrent(), Recurrent()
    optimizer = sgd(reference)
    for index in range(2):
        optimizer.zero_grad()
        (sum(reference(batch(index, part)).square().mean() for part in range(2)) / 2).backward()
        optimizer.step()
    with shardkit.prepare(model, sgd(model), "fsdp") as session:
        assert_close(train(session, steps=2), dict(reference.state_dict()))
    assert all(one is other for one, other in zip(model.layer._flat_weights, model.layer.parameters(), strict=True))
    with torch.no_grad():
        assert_close(model(batch(9, 9)), reference(batch(9, 9)))


@check
def complex_parameters_in_a_module_of_their_own_train(rank: int) -> None:
    def build() -> nn.Module:
        model = Phases()
        del model.turn
        return model

    def trained(model: nn.Module) -> list[Tensor]:
        return [value for value in model.parameters() if value.requires_grad]

    reference, model = build(), build()
    optimizer = torch.optim.SGD(trained(reference), lr=0.1)
    for index in range(2):
        optimizer.zero_grad()
        (sum(reference(batch(index, part)) for part in range(2)) / 2).backward()
        optimizer.step()
    with shardkit.prepare(model, torch.optim.SGD(trained(model), lr=0.1), "fsdp") as session:
        for index in range(2):
            step(session, session.model(batch(index, rank)))
        assert_close(session.full_weights(), dict(reference.state_dict()), 2e-6)


@check
def a_parameter_thawed_on_one_rank_only_is_refused(rank: int) -> None:
    model = mlp()
    model[2].bias.requires_grad_(False)
    session = shardkit.prepare(model, sgd(model), "fsdp")
    train(session, steps=1)
    model[2].bias.requires_grad_(rank == 0)
    with pytest.raises(UnsupportedError, match=r"on some ranks only|the ranks parted"):
        train(session, steps=1, first=1)
    with pytest.raises(StateError, match="from a checkpoint"):
        session.close()


@cache
def found() -> list[dict[str, str]]:
    return run(_run_checks, list(CHECKS), processes=2, timeout=200)


def _run_checks(names: list[str]) -> dict[str, str]:
    import os
    import traceback

    failures = {}
    for name in names:
        try:
            CHECKS[name](int(os.environ["RANK"]))
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    return failures


@pytest.mark.parametrize("name", CHECKS)
def test_fsdp(name: str) -> None:
    for rank, failures in enumerate(found()):
        assert name not in failures, f"rank {rank}:\n{failures[name]}"


class Rows(nn.Module):
    """Parameters with fewer rows than ranks, and with rows that don't come out even."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.four = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(4, 8))
        self.number, self.two = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.one) @ self.four.t()) * self.number + self.two.sum()


def _train_rows(accumulate: int) -> tuple[dict[str, Tensor], float, list[tuple[str, int, int]]]:
    model = Rows()
    strategy = Strategy("fsdp", accumulate=accumulate, track_grad_norm=True)
    with shardkit.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05), strategy) as session:
        weights = train(session, steps=3)
        shards = [(name, start, part.numel()) for name, start, part, _ in session._engine.weight_shards()]
        norm = session.grad_norm
    assert_close(dict(model.state_dict()), weights, 0)
    assert model.number.shape == ()
    return weights, norm, shards


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_trains_as_one_process_does(ranks: int) -> None:
    reference = Rows()
    expected = train_alone(reference, torch.optim.Adam(reference.parameters(), lr=0.05), steps=3, parts=2 * ranks)
    results = run(_train_rows, 2, processes=ranks, timeout=60)
    for weights, _, _ in results:
        assert_close(weights, expected, 2e-6)
    assert len({norm for _, norm, _ in results}) == 1
    runs = sorted(itertools.chain.from_iterable(shards for _, _, shards in results))
    for name, value in reference.named_parameters():
        held = [(start, size) for other, start, size in runs if other == name]
        assert held[0][0] == 0
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise([*held, (value.numel(), 0)]))


def _twice(model: Any, rank: int, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss + model(x).square().mean() if rank == 0 else loss


def _no_module(model: Any, rank: int, x: Tensor) -> Tensor:
    return model(x).square().mean() if rank == 0 else torch.zeros((), requires_grad=True) * 1.0


def _part(known: int) -> list[str]:
    messages = []
    for way in (_twice, _no_module):
        model = mlp()
        session = shardkit.prepare(model, sgd(model), "fsdp")
        train(session, steps=known)
        with pytest.raises(UnsupportedError) as caught:
            step(session, way(session.model, session.rank, batch(0, session.rank)))
        messages.append(str(caught.value))
        if known:
            # A rank is still in a collective: the weights are out of reach, and the process is not.
            with pytest.raises(StateError, match="from a checkpoint"):
                session.close()
        else:
            session.close()
            assert_close(dict(model.state_dict()), dict(mlp().state_dict()), 0)
        # A process group with an operation in progress would wait for it, for ever, when it is collected.
        del session, caught
        gc.collect()
        other = mlp()
        with shardkit.prepare(other, sgd(other), "fsdp") as session:
            reference = mlp()
            assert_close(train(session, 1), train_alone(reference, sgd(reference), 1, 2))
    return messages


@pytest.mark.parametrize("known", [0, 2], ids=["in the first step", "from a path that all know"])
def test_ranks_that_part_are_all_refused(known: int) -> None:
    first, second = run(_part, known, processes=2, timeout=60)
    assert first == second
    assert all("the ranks parted (rank 0 at '0', rank 1 at" in message for message in first)
    assert "the end of its backward" in first[1]


def prepared_again() -> str:
    """Part the ranks under a process group of one's own, and prepare again in it."""
    dist.init_process_group("gloo")
    model = mlp()
    with contextlib.suppress(StateError), shardkit.prepare(model, sgd(model), "fsdp") as session:
        train(session, steps=2)
        with pytest.raises(UnsupportedError, match="parted"):
            step(session, _twice(session.model, session.rank, batch(0, session.rank)))
    other = mlp()
    try:
        shardkit.prepare(other, sgd(other), "ddp")
    except StateError as error:
        return str(error)
    return "prepared"


def test_after_ranks_parted_under_a_group_of_the_users_own_prepare_says_that_it_cannot_be_used() -> None:
    for told in run(prepared_again, timeout=60):
        assert "parted in the midst of a collective" in told
        assert "new processes" in told
