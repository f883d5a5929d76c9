"""The reducer that gives up its memory between windows: gradients by hand, and the bytes that a rank holds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from shardkit import averaging
from shardkit.averaging import Reducer, ReducerFootprint
from shardkit.testing import run
from shardkit.testing._record import record
from shardkit.testing.cases._models import Prepare
from shardkit.testing.cases._table import Run, load_cases
from tests.contract.page import PRODUCT, read

SIZE = 1100
"""A square matrix of that many rows is large enough for a bucket whose memory is given up."""

LAYER = SIZE * SIZE * 4


class Layers(nn.Module):
    """Matrices ``w0``, ``w1``, ... of ones; a loss ``factor * sum(w)`` over those named: a gradient of ``factor``."""

    def __init__(self, count: int = 3, size: int = SIZE) -> None:
        super().__init__()
        for place in range(count):
            self.register_parameter(f"w{place}", nn.Parameter(torch.ones(size, size)))

    def loss(self, factor: float, *names: str) -> Tensor:
        return torch.stack([factor * getattr(self, name).sum() for name in names]).sum()


def reducer(model: nn.Module) -> Reducer:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    made = Reducer(model)
    made.drop()
    return made


def resident(made: Reducer) -> int:
    """Return the bytes of the large buckets."""
    return sum(bucket._storage.nbytes() for bucket in made._buckets or ())


def gradients(model: nn.Module) -> list[float | None]:
    """Return the gradient of each parameter, all of whose elements are the same."""
    found: list[float | None] = []
    for value in model.parameters():
        assert value.grad is None or bool((value.grad == value.grad.flatten()[0]).all())
        found.append(None if value.grad is None else value.grad.flatten()[0].item())
    return found


ONE = torch.ones(())


def passes() -> list[Any]:
    """Make windows of several kinds; return gradients and bytes after each pass, and bytes after each window."""
    model = Layers()
    made = reducer(model)
    rank = dist.get_rank()
    found: list[Any] = [resident(made)]
    names = ("w0", "w1", "w2")

    def window(*losses: Callable[[], Tensor]) -> None:
        for loss in losses[:-1]:
            loss().backward()
            found.append(resident(made))
        made.backward(losses[-1](), ONE)
        found.append((gradients(model), resident(made)))
        made.drop()
        found.append((gradients(model), resident(made)))

    window(lambda: model.loss(rank + 1, *names))
    window(lambda: model.loss(rank + 1, *names), lambda: model.loss(10, *names))
    # A parameter that one rank doesn't use, one that no rank uses, and a rank whose loss depends on none.
    window(lambda: model.loss(2, *(names[:2] if rank else names[1:2])))
    window(lambda: model.loss(4, *names) if rank else torch.zeros((), requires_grad=True))
    model.w1.requires_grad_(False)
    window(lambda: model.loss(rank + 1, *names))
    model.w1.requires_grad_(True)
    window(lambda: model.loss(rank + 1, *names))
    return found


def test_averages_are_right_and_no_large_bucket_has_memory_between_windows() -> None:
    whole = 3 * LAYER
    for found in run(passes):
        assert found[0] == 0
        none = ([None, None, None], 0)
        assert found[1:3] == [([1.5, 1.5, 1.5], whole), none]
        # A micro-batch that isn't the last leaves its gradients outside of the buckets.
        assert found[3:6] == [0, ([11.5, 11.5, 11.5], whole), none]
        assert found[6:8] == [([1.0, 2.0, None], whole), none]
        assert found[8:10] == [([2.0, 2.0, 2.0], whole), none]
        assert found[10:12] == [([1.5, None, 1.5], whole), none]
        assert found[12:14] == [([1.5, 1.5, 1.5], whole), none]


def one_at_a_time() -> list[int]:
    """Return the bytes of the buckets when each gradient comes, the last layer's first."""
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)])
    dist.init_process_group("gloo")
    made = Reducer(model, bucket_cap_mb=1)
    made.drop()
    found: list[int] = []
    for value in model.parameters():
        value.register_hook(lambda _: found.append(resident(made)))
    made.backward(model(torch.ones(1, SIZE)).sum(), ONE)
    return found


def test_memory_comes_back_bucket_by_bucket() -> None:
    assert run(one_at_a_time)[0] == [0, LAYER, 2 * LAYER]


def kept() -> tuple[float, float, float, int]:
    model = Layers(1)
    made = reducer(model)
    made.backward(model.loss(2, "w0"), ONE)
    gradient = model.w0.grad
    assert gradient is not None
    made.drop()
    whole = gradient[0, 0].item()
    made.backward(model.loss(3, "w0"), ONE)
    assert model.w0.grad is not None
    part = model.w0.grad[0]
    del gradient
    made.drop()
    view = part[0].item()
    made.backward(model.loss(4, "w0"), ONE)
    del part
    made.drop()
    made.backward(model.loss(5, "w0"), ONE)
    value = gradients(model)[0]
    made.drop()
    assert value is not None
    return whole, view, value, resident(made)


def test_a_gradient_that_someone_holds_keeps_its_memory() -> None:
    assert run(kept)[0] == (2.0, 3.0, 5.0, 0)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in mid-pass")


def failed() -> list[float | None]:
    model = Layers(2)
    made = reducer(model)
    with pytest.raises(ValueError, match="in mid-pass"):
        made.backward(model.loss(1, "w0") + Raises.apply(model.loss(1, "w1")), ONE)  # type: ignore[no-untyped-call]
    for value in model.parameters():
        value.grad = None
    # The failed one's hooks see this pass, too, and mustn't write to memory that is gone.
    model.loss(3, "w0", "w1").backward()
    alone = gradients(model)
    made.close()
    made = reducer(model)
    for value in model.parameters():
        value.grad = None
    made.backward(model.loss(dist.get_rank(), "w0", "w1"), ONE)
    return alone + gradients(model)


def test_after_a_pass_that_failed_another_reducer_takes_over() -> None:
    assert run(failed) == [[3.0, 3.0, 0.5, 0.5]] * 2


def watched() -> list[Any]:
    seen: list[Any] = []
    model = Layers(1)
    model.w0.register_hook(lambda gradient: seen.append(gradient))
    model.w0.register_post_accumulate_grad_hook(lambda value: seen.append(value))
    reducer(model)
    return seen


def test_hooks_of_the_user_see_nothing_of_the_search_for_the_buckets() -> None:
    assert run(watched)[0] == []


def small() -> tuple[int, list[float | None]]:
    averaging.LARGE_BUCKET = 1
    model = Layers(3, size=2)
    made = reducer(model)
    made.backward(model.loss(dist.get_rank(), "w0", "w2"), ONE)
    return len(made._buckets or ()), gradients(model)


def test_buckets_of_several_parameters_are_given_up_together() -> None:
    assert run(small) == [(1, [0.5, None, 0.5])] * 2


def held(spec: str) -> float:
    """Return what a session holds between two windows, over the bytes of its model."""
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    model, optimizer = _trainable(8)
    with shardkit.prepare(model, optimizer, spec) as session:
        _step(session, 8)
    before = _resident()
    model, optimizer = _trainable(SIZE)
    with shardkit.prepare(model, optimizer, spec) as session:
        for _ in range(3):
            _step(session, SIZE)
        return (_resident() - before) / sum(value.nbytes for value in model.parameters())


def _trainable(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(6)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _step(session: Any, size: int) -> None:
    session.backward(session.model(torch.ones(1, size)).sum())
    session.step()


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


@pytest.mark.parametrize(
    ("spec", "copies"),
    [("ddp", 2), ("ddp:gradient_as_bucket_view=false", 3), ("fairscale:shard=optimizer", 1.5), ("fairscale", 1.5)],
)
def test_between_windows_a_rank_holds_weights_and_state(spec: str, copies: float) -> None:
    if spec.startswith("fairscale"):
        pytest.importorskip("fairscale")
    for found in run(held, spec):
        assert found == pytest.approx(copies, abs=0.2)


def test_the_footprint_assigns_parameters_to_buckets_as_torch_does() -> None:
    from shardkit._footprint import ParameterSize

    generator = torch.Generator().manual_seed(0)
    elements = [int(torch.randint(1, 3_000_000, (1,), generator=generator)) for _ in range(60)]
    sizes = [2 if place % 7 == 0 else 4 for place in range(60)]
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    tensors = [
        torch.empty(count, dtype=dtypes[size], device="meta") for count, size in zip(elements, sizes, strict=True)
    ]
    told = [
        ParameterSize(str(place), (count,), size, True, True)
        for place, (count, size) in enumerate(zip(elements, sizes, strict=True))
    ]
    for cap, limits in ((None, [2**20, 25 * 2**20]), (25.0, [25 * 2**20]), (0.5, [2**19])):
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        found = [[int(value.name) for value in bucket] for bucket in averaging._assigned(told, cap)]
        assert sorted(found) == sorted(expected)


def test_the_footprint_holds_a_bucket_from_its_first_gradient_to_the_end_of_the_window() -> None:
    from shardkit._footprint import ParameterSize

    large, little = 5 * 2**20, 100
    shapes = {"a": large, "b": little, "c": large, "d": large}
    parameters = [ParameterSize(name, (size,), 1, True, True) for name, size in shapes.items()]
    footprint = ReducerFootprint(parameters, bucket_cap_mb=9)
    # Buckets of a, b and c, and of d.
    assert (footprint.buffers, footprint.most) == (0, 3 * large + little)
    assert footprint.ready("d", large, last=False) == 0
    assert footprint.gradients == large
    assert footprint.ready("d", 0, last=True) == large
    assert footprint.gradients == large
    assert footprint.ready("b", little, last=True) == little
    assert footprint.gradients == 3 * large + little
    assert footprint.ready("c", large, last=True) == large
    assert footprint.gradients == 3 * large + little
    footprint.drop()
    assert footprint.gradients == 0


def with_the_smallest_buckets(case: Run) -> Run:
    def run_it(prepare: Prepare, rank: int) -> None:
        averaging.LARGE_BUCKET = 1
        case(prepare, rank)

    return run_it


@pytest.mark.parametrize(
    "topic",
    [
        "parameters",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("passes", "losses", "windows", "public", "state")),
    ],
)
@pytest.mark.parametrize("under", ["ddp", "fairscale:shard=optimizer"])
def test_every_case_is_right_or_refused_where_the_smallest_bucket_is_given_up(topic: str, under: str) -> None:
    cells = read(PRODUCT)["cells"][under]
    expected = {name: cell["kind"] for name, cell in cells.items() if cell["kind"] != "left out"}
    cases = {name: case for name, case in load_cases().items() if case.topic == topic and name in expected}
    found = record(under, {name: with_the_smallest_buckets(case.run) for name, case in cases.items()})
    for name, outcomes in found.items():
        assert {outcome.kind for outcome in outcomes} == {expected[name]}, f"{name}: {outcomes[0].trace}"
