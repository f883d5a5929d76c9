"""What only the backend zero has: parameters with one owner each, that stay where they are."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from shardkit import ModelSize, ParameterSize, Strategy
from shardkit.testing import preload, run
from shardkit.testing.cases._models import assert_close, batch, mlp, sgd, train, train_alone

preload("shardkit_zero._library")

MIB = 2**20


class Mixed(nn.Module):
    """Parameters of all kinds: of three dtypes, in another order in memory, empty, large, and many small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)
        self.large = nn.Parameter(torch.randn(300, 300))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.pairs = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.gaps = nn.Parameter(torch.randn(300, 600)[:, ::2])
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        # More than what travels together, and more than what may be on its way.
        self.small = nn.ParameterList(torch.randn(200, 200) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.conv(x), self.large, self.wide, self.pairs.abs(), self.turned, self.gaps, self.scalar, self.empty]
        return sum((part.double().square().sum() * (1 + x.mean()) for part in [*parts, *self.small]), torch.zeros(()))


def image(step: int, part: int) -> Tensor:
    return torch.randn(1, 64, 4, 4, generator=torch.Generator().manual_seed(10 * step + part))


def places(model: nn.Module) -> list[Any]:
    return [(value.data_ptr(), value.stride(), value.untyped_storage().nbytes()) for value in model.parameters()]


def mixed() -> dict[str, Any]:
    """Train it, and return the weights, and whether all stayed where they were."""
    model, other = Mixed(), Mixed()
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=1e-4, momentum=0.9) for one in (model, other))
    before = places(model)
    with shardkit.prepare(model, optimizer, "zero") as session:
        for index in range(3):
            session.backward(session.model(image(index, session.rank)))
            session.step()
            for part in range(2):
                (other(image(index, part)) / 2).backward()
            plain.step()
            plain.zero_grad()
        assert_close(session.full_weights(), dict(other.state_dict()), 2e-5)
        during = places(model)
    return {"stayed": before == during == places(model), "weights": model.state_dict()}


@cache
def trained() -> list[dict[str, Any]]:
    return run(mixed)


def test_parameters_of_all_kinds_train_side_by_side_and_are_the_same_on_every_rank() -> None:
    one, other = (found["weights"] for found in trained())
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_parameters_stay_in_the_memory_that_they_have() -> None:
    assert [found["stayed"] for found in trained()] == [True, True]


class Decaying(torch.optim.SGD):
    """Decays what has no gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    value.mul_(0.5)


class Failing(torch.optim.SGD):
    """Fails once it is told to, where it has something to step."""

    fail = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fail and any(value.numel() == 3 for group in self.param_groups for value in group["params"]):
            raise ValueError("this owner's settings are bad")
        super().step()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, *names: str) -> Tensor:
        return torch.stack([getattr(self, name).sum() for name in names]).sum()


def life() -> dict[str, Any]:
    """Return what is seen of sessions, one after another."""
    found: dict[str, Any] = {}
    model = Parts()
    with shardkit.prepare(model, Decaying(model.parameters(), lr=0.1), "zero") as session:
        session.backward(session.model("a"))
        session.step()
        found["decayed"] = {name: value.tolist() for name, value in model.named_parameters()}

    model = Parts()
    optimizer = Failing(model.parameters(), lr=0.1)
    with shardkit.prepare(model, optimizer, "zero") as session:
        optimizer.fail = True
        session.backward(session.model("a", "b"))
        with pytest.raises(ValueError, match="this owner's settings are bad") as caught:
            session.step()
        found["notes"] = getattr(caught.value, "__notes__", [])

    model = Parts()
    model.a.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sent: list[int] = []
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    broadcast = dist.broadcast

    def counted(value: Tensor, *rest: Any, **more: Any) -> Any:
        sent.append(value.numel())
        return broadcast(value, *rest, **more)

    with shardkit.prepare(model, optimizer, "zero") as session:
        for names in (["b"], ["a", "b"], ["a"]):
            model.a.requires_grad_("a" in names)
            model.b.requires_grad_("b" in names)
            session.backward(session.model(*names))
            sent.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "broadcast", counted)
                session.step()
            found["".join(names)] = list(sent)
        stepper = session._engine.stepper
        assert stepper is not None
        found["state"] = [value.numel() for value in stepper.state]
        found["user's"] = len(optimizer.state)
    logging.getLogger().removeHandler(handler)
    found["log"] = [record.getMessage() for record in records]
    found["left"] = len(stepper.state)

    model = Parts()
    model.a.data = torch.ones(2)
    model.b.data = model.a.data
    with pytest.raises(shardkit.errors.UnsupportedError, match=r"'zero'.*'a' and 'b' share memory"):
        shardkit.prepare(model, sgd(model), "zero")
    with shardkit.prepare(model, torch.optim.SGD([model.a], lr=0.1), "zero") as session:
        session.backward(session.model("a", "b"))
        session.step()
        found["shared"] = model.b.tolist()
    return found


@cache
def lived() -> list[dict[str, Any]]:
    return run(life)


def test_what_an_optimizer_changes_without_a_gradient_reaches_all_ranks() -> None:
    for found in lived():
        assert found["decayed"]["a"] == pytest.approx([0.9] * 3)
        assert found["decayed"]["b"] == [0.5] * 2


def test_an_error_of_one_owner_is_raised_on_every_rank() -> None:
    # Each of them caught it; the larger parameter is rank 0's.
    assert not any("raised on rank" in note for note in lived()[0]["notes"])
    assert any("raised on rank 0" in note for note in lived()[1]["notes"])


def test_only_what_was_updated_travels_and_nothing_is_logged() -> None:
    for found in lived():
        assert (found["b"], found["ab"], found["a"]) == ([2], [3, 2], [3])
        assert found["log"] == []


def test_each_rank_holds_the_state_of_its_own_parameters_until_the_session_is_closed() -> None:
    assert [found["state"] for found in lived()] == [[3], [2]]
    assert [(found["user's"], found["left"]) for found in lived()] == [(0, 0), (0, 0)]


def test_shared_memory_with_one_trained_parameter_is_right_and_with_two_refused() -> None:
    assert [found["shared"] for found in lived()] == [[pytest.approx(0.9)] * 2] * 2


def two_runs() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights that are reached in one process, by torch's class itself, and by a session. Collective."""
    from shardkit_zero._library import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def adam(given: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1)

    alone = mlp()
    one = train_alone(alone, adam(alone.parameters()), 5, 2, max_norm=0.1)
    model = mlp()
    with shardkit.prepare(
        model, adam(model.parameters()), Strategy("zero", max_grad_norm=0.1, options={"overlap": False})
    ) as session:
        own = train(session, 5)
        raw = mlp()
        wrapped = DistributedDataParallel(raw)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2, weight_decay=0.1
        )
        for index in range(5):
            optimizer.zero_grad()
            wrapped(batch(index, session.rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
    return one, dict(raw.state_dict()), own


def test_a_run_is_that_of_torchs_class_bit_for_bit() -> None:
    for one, raw, own in run(two_runs):
        assert_close(own, one, 1e-5)
        assert all(torch.equal(own[name], raw[name]) for name in raw)


def size(world_size: int, *sizes: float, frozen: tuple[int, ...] = (), left_out: tuple[int, ...] = ()) -> ModelSize:
    """Return a model of parameters "0", "1", ... of so many MiB."""
    return ModelSize(
        tuple(
            ParameterSize(str(place), (int(one * MIB // 4),), 4, place not in frozen, place not in left_out)
            for place, one in enumerate(sizes)
        ),
        world_size,
    )


def test_the_fullest_rank_has_the_state_of_its_own_parameters_in_the_order_of_its_step() -> None:
    from shardkit_zero._footprint import ZeroFootprint

    # 30 to the first, 20 and 10 to the second, 5 to the first, which has it before, and 4 to the second, the emptiest.
    held = ZeroFootprint(size(2, 5, 10, 30, 20, 4, 40, left_out=(5,)), bucket_cap_mb=None, overlap=True)
    assert [item.like for item in held.stepped()] == ["2", "0"]
    assert held.held.parameters == 109 * MIB


def test_copies_of_small_parameters_on_their_way_count_in_a_step() -> None:
    from shardkit_zero._footprint import ZeroFootprint

    held = ZeroFootprint(size(2, *[0.125] * 24), bucket_cap_mb=None, overlap=True)
    assert held.step() == 3 * MIB
    assert ZeroFootprint(size(2, *[0.125] * 80), bucket_cap_mb=None, overlap=True).step() == 4 * MIB
    assert ZeroFootprint(size(1, *[0.125] * 80), bucket_cap_mb=None, overlap=True).step() == 0


def ownership() -> tuple[list[list[str]], list[list[str]]]:
    """Return which parameters each rank owns, as torch and as the footprint have it."""
    from shardkit_zero._footprint import owned

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(int(a), int(b)) for a, b in torch.randint(1, 60, (12, 2))])
    net[3].requires_grad_(False)
    left_out = {id(net[1].weight), id(net[8].bias)}
    optimizer = torch.optim.SGD([value for value in net.parameters() if id(value) not in left_out], lr=0.1)
    sizes = [
        ParameterSize(name, tuple(value.shape), 4, value.requires_grad, id(value) not in left_out)
        for name, value in net.named_parameters()
    ]
    names = {id(value): name for name, value in net.named_parameters()}
    with shardkit.prepare(net, optimizer, "zero") as session:
        parts = session._engine._shards._partition_parameters()  # type: ignore[attr-defined]
        found = [[names[id(value)] for group in part for value in group["params"]] for part in parts]
    return found, [[value.name for value in part] for part in owned(sizes, 3)]


def test_the_footprint_shares_parameters_out_as_torch_does() -> None:
    torchs, told = run(ownership, processes=3)[0]
    assert told == torchs
