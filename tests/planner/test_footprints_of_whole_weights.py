"""What the backends that hold whole weights say of their memory: by hand, and beside the peak of real ranks."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Footprint, ModelSize, Strategy
from shardkit._footprint import ParameterSize
from shardkit._options import typed_options
from shardkit._registry import describe, footprint
from shardkit.testing import run
from shardkit.workloads import Workload

MIB = 2**20
SCRATCH = 2 * MIB
"""What gloo takes in a collective of that much or more."""


def model(world_size: int, *sizes: int, frozen: tuple[int, ...] = (), left_out: tuple[int, ...] = ()) -> ModelSize:
    """Return a model of parameters "0", "1", ... of so many MiB."""
    return ModelSize(
        tuple(
            ParameterSize(str(place), (size * MIB // 4,), 4, place not in frozen, place not in (*left_out, *frozen))
            for place, size in enumerate(sizes)
        ),
        world_size,
    )


def told(size: ModelSize, spec: str) -> Footprint:
    strategy = Strategy.parse(spec)
    backend = describe(strategy.backend)
    found = footprint(backend.name, size, strategy, typed_options(backend, strategy.options))
    assert found is not None
    return found


def ready(held: Footprint, *names: str, last: bool = True) -> list[tuple[int, int]]:
    """Return for each gradient, of as many bytes as its parameter, what is held and what is in passing, in MiB."""
    sizes = {value.name: value.nbytes for value in held.model.parameters}
    found = []
    for name in names:
        passing = held.ready(name, sizes[name], last=last)
        found.append((held.held.gradients // MIB, passing // MIB))
    return found


def test_ddp_holds_whole_weights_and_state_and_a_bucket_from_its_first_gradient_on() -> None:
    # Buckets as torch fills them: a first one of 1 MiB and more, then of 25 MiB and more.
    held = told(model(2, 1, 20, 10, 40, frozen=(3,)), "ddp")
    assert held.held.parameters == 71 * MIB
    assert [item.like for item in held.stepped()] == ["0", "1", "2"]
    # The bucket of 1 MiB is too small to be given up, and is always held.
    assert (held.held.buffers, held.held.gradients) == (1 * MIB, 0)
    assert ready(held, "2", "1", "0") == [(30, 10), (30, 20), (30, 2)]
    assert held.step() == SCRATCH
    assert (held.held.buffers, held.held.gradients) == (1 * MIB, 0)


def test_gradients_of_earlier_micro_batches_move_into_the_buckets_one_by_one() -> None:
    held = told(model(2, 20, 30), "ddp:accumulate=2")
    assert ready(held, "1", "0", last=False) == [(30, 0), (50, 0)]
    assert [held.ready(name, 0, last=True) // MIB for name in ("1", "0")] == [30, 20]
    assert held.held.gradients == 50 * MIB


@pytest.mark.parametrize(
    ("spec", "buffers", "gradients", "passing"),
    [
        ("ddp:gradient_as_bucket_view=false", 50, 50, SCRATCH),
        ("ddp:overlap=false", 0, 50, SCRATCH + 25 * MIB),
    ],
)
def test_other_settings_of_ddp_hold_copies(spec: str, buffers: int, gradients: int, passing: int) -> None:
    held = told(model(2, 20, 30), spec)
    ready(held, "1", "0")
    assert (held.held.buffers // MIB, held.held.gradients // MIB) == (buffers, gradients)
    assert held.step() == passing


def test_one_process_has_no_buckets() -> None:
    for spec in ("ddp", "fairscale", "fairscale:shard=optimizer", "zero"):
        held = told(model(1, 20, 30), spec)
        assert ready(held, "1", "0") == [(30, 0), (50, 0)]
        assert (held.held.buffers, held.step()) == (0, 0)


def test_fairscale_keeps_the_gradients_of_its_own_parameters() -> None:
    # The next goes to the rank with fewest elements: 30 + 5 to the first, 20 + 10 + 4 to the second.
    held = told(model(2, 30, 20, 10, 5, 4), "fairscale")
    assert [item.like for item in held.stepped()] == ["0", "3"]
    # 16 MiB and the newest may be on their way: 4 arrives at its owner once 1 has come, 2 and 1 once 0 has.
    assert ready(held, "4", "3", "2", "1", "0") == [(4, 2), (9, 2), (19, 2), (35, 4 + 2), (35, 30 + 2)]
    assert held.step() == SCRATCH
    assert held.held.gradients == 0


def test_fairscale_moves_the_parameters_into_buffers_and_finds_its_buckets_when_it_is_built() -> None:
    assert told(model(2, 30, 20, 10, 5, 4), "fairscale").prepare() == 35 * MIB
    # All buckets, and zeros for the largest parameter.
    assert told(model(2, 30, 20, 10, 5, 4), "fairscale:shard=optimizer").prepare() == (69 + 30) * MIB


def test_with_sharded_state_alone_all_gradients_stay() -> None:
    held = told(model(2, 30, 30), "fairscale:shard=optimizer")
    assert [item.like for item in held.stepped()] == ["0"]
    assert ready(held, "1", "0") == [(30, 30), (60, 30)]


def test_a_frozen_parameter_counts_as_one_element_and_one_that_is_left_out_comes_last() -> None:
    held = told(model(2, 40, 8, 8, 30, frozen=(0,), left_out=(3,)), "fairscale")
    # 1 and 2 go to a rank each, then the frozen 0 to the first, for one element, and so 3 to the second, the fullest.
    assert [item.like for item in held.stepped()] == ["2"]
    assert held.held.parameters == 86 * MIB


def ownership() -> tuple[list[list[str]], list[list[str]]]:
    """Return which parameters each rank owns, as the library and as the footprint have it."""
    from shardkit_fairscale._footprint import owned

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(int(a), int(b)) for a, b in torch.randint(1, 60, (12, 2))])
    for place in (3, 4, 11):
        net[place].requires_grad_(False)
    net[6].weight.requires_grad_(False)
    left_out = {id(net[1].weight), id(net[8].bias)}
    optimizer = torch.optim.SGD([value for value in net.parameters() if id(value) not in left_out], lr=0.1)
    sizes = [
        ParameterSize(name, tuple(value.shape), 4, value.requires_grad, id(value) not in left_out)
        for name, value in net.named_parameters()
    ]
    names = {id(value): name for name, value in net.named_parameters()}
    with shardkit.prepare(net, optimizer, "fairscale") as session:
        oss = session._engine._shard.oss  # type: ignore[attr-defined]
        parts = [[names[id(p)] for group in part for p in group["params"]] for part in oss.partition_parameters()]
    return [sorted(part) for part in parts], [sorted(value.name for value in part) for part in owned(sizes, 3)]


def test_the_footprint_shares_parameters_out_as_the_library_does() -> None:
    pytest.importorskip("fairscale")
    library, told = run(ownership, processes=3)[0]
    assert told == library


def test_thousands_of_ranks_take_no_time() -> None:
    size = model(4096, *range(1, 1001))
    start = time.perf_counter()
    # More ranks than parameters: the fullest owns the largest.
    assert [item.like for item in told(size, "fairscale").stepped()] == ["999"]
    assert time.perf_counter() - start < 1


SIZE, BATCH = 1024, 64


def workload() -> Workload:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(12)])

    def batches(size: int) -> Iterator[Tensor]:
        return repeat(torch.ones(size, SIZE))

    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    return Workload(net, optimizer, lambda net, batch: net(batch).mean(), batches)


def peak(spec: str) -> int:
    """Return the most bytes that three steps hold over what the process held before."""
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    tiny = nn.Linear(8, 8)
    with shardkit.prepare(tiny, torch.optim.AdamW(tiny.parameters(), fused=True), spec) as session:
        for _ in range(3):
            session.backward(session.model(torch.ones(1, 8)).mean())
            session.step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    made = workload()
    batches = made.batches(BATCH)
    with shardkit.prepare(made.model, made.optimizer, spec) as session:
        for _ in range(3):
            session.backward(made.loss(session.model, next(batches)))
            session.step()
        return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


@pytest.mark.parametrize("spec", ["ddp", "ddp:overlap=false", "fairscale", "fairscale:shard=optimizer", "zero"])
def test_the_planned_peak_is_within_a_tenth_of_that_of_real_ranks(spec: str) -> None:
    if spec.startswith("fairscale"):
        pytest.importorskip("fairscale")
    row = shardkit.plan(workload, strategies=[spec], precisions=["fp32"], batch_size=BATCH, device="cpu").rows[0]
    assert row.peak is not None
    assert row.peak > 64 * MIB
    assert row.peak == pytest.approx(max(run(peak, spec)), rel=0.1)
