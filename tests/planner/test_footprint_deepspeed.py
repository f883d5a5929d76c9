"""What the plugin says that DeepSpeed's stages hold, against numbers by hand and against what real ranks hold."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardkit_deepspeed import shardkit_footprint
from torch import Tensor, nn

import shardkit
from shardkit import Footprint, ModelSize, ParameterSize, Strategy, Workload
from shardkit._options import typed_options
from shardkit.errors import StrategyError
from shardkit.testing import run

STAGES = ("stage=0", "stage=1", "stage=2", "stage=3")
HALF = tuple(f"stage={stage},half_weights=true" for stage in (1, 2, 3))
OFFLOADS = ("stage=2,offload_optimizer=cpu", "stage=3,offload_optimizer=cpu,offload_parameters=cpu")
VARIANTS = (*STAGES, *OFFLOADS)

RECORDS = 64 * 1024
"""Bytes of what stage 3 notes of each parameter."""


def told(model: ModelSize, options: str, **more: Any) -> Footprint:
    strategy = dataclasses.replace(Strategy.parse(f"deepspeed:{options}"), **more)
    return shardkit_footprint(model, strategy, typed_options(shardkit.backends()["deepspeed"], strategy.options))


def asked(options: str, accumulate: int) -> Strategy:
    precision = "bf16" if "half" in options else "fp32"
    return dataclasses.replace(Strategy.parse(f"deepspeed:{options}"), accumulate=accumulate, precision=precision)


def sizes(*shapes: tuple[int, ...], world_size: int = 2, device: str = "cpu") -> ModelSize:
    values = [ParameterSize(f"p{at}", shape, 4, trainable=True, updated=True) for at, shape in enumerate(shapes)]
    return ModelSize(tuple(values), world_size, device)


def backward(held: Footprint, *, last: bool = True) -> int:
    """Bring all gradients, last parameter first; return the most bytes of gradients and buffers at a time."""
    most = 0
    for value in reversed(held.model.parameters):
        passing = held.ready(value.name, value.nbytes, last=last)
        most = max(most, held.held.gradients + held.held.buffers + passing)
    return most


# By hand. A bucket is at least 2**18 elements, so that a small model goes in one.

THREE = sizes((100,), (60,), (40,))


def test_stage_0_holds_all_on_every_rank() -> None:
    found = told(THREE, "stage=0")
    assert found.held.parameters == 800
    assert [(item.shape, item.like) for item in found.stepped()] == [((100,), "p0"), ((60,), "p1"), ((40,), "p2")]
    backward(found)
    assert found.held.gradients == 800
    found.step()
    assert found.held.total == 800


def test_stage_1_keeps_half_of_the_gradients_of_a_window_that_is_whole() -> None:
    found = told(THREE, "stage=1", accumulate=2)
    backward(found, last=False)
    assert found.held.gradients == 800
    for value in THREE.parameters:
        found.ready(value.name, 0, last=True)
    assert found.held.gradients == 400
    assert found.held.parameters == 800
    assert found.held.buffers == 0
    found.step()
    assert found.held.total == 800


def test_stage_1_cuts_the_model_in_equal_parts_across_parameters() -> None:
    found = told(sizes((100,), (61,), (40,)), "stage=1")
    # 201 elements in two parts of an even number each, 102.
    assert [(item.shape, item.like) for item in found.stepped()] == [((100,), "p0"), ((2,), "p1")]
    assert found.held.parameters == 2 * 102 * 4


def test_stage_2_deals_parameters_out_and_keeps_half_of_each_micro_batchs_gradients() -> None:
    found = told(THREE, "stage=2")
    # The order is p0, p2, p1, of 100, 40 and 60 elements.
    assert [(item.shape, item.like) for item in found.stepped()] == [((100,), "p0")]
    found.ready("p2", 160, last=False)
    # In the buffer.
    assert (found.held.gradients, found.held.buffers) == (0, 200 * 4)
    found.ready("p1", 240, last=False)
    found.ready("p0", 400, last=False)
    assert (found.held.gradients, found.held.buffers) == (400, 0)
    backward(found)
    assert (found.held.gradients, found.held.buffers) == (400, 0)


def test_stage_2_keeps_a_gradient_larger_than_the_bucket_where_it_is() -> None:
    found = told(THREE, "stage=2,reduce_bucket_size=50")
    found.ready("p1", 240, last=True)
    assert (found.held.gradients, found.held.buffers) == (240, 200)
    found.ready("p0", 400, last=True)
    # That of p1 is the second rank's.
    assert found.held.gradients == 240 + 400


def test_stage_3_holds_half_of_each_parameter_and_whole_ones_of_a_module_that_runs() -> None:
    found = told(sizes((101,), (60,)), "stage=3")
    assert found.held.parameters == (51 + 30) * 4
    assert [item.shape for item in found.stepped()] == [(51,), (30,)]
    # As much again is received by gloo.
    assert found.forward(["p0"]) == 102 * 4
    assert found.held.parameters == (51 + 30 + 102) * 4
    found.forward(["p1"])
    assert found.held.parameters == (51 + 30 + 60) * 4
    found.forward([])
    found.backward(["p1"])
    found.ready("p1", 240, last=True)
    assert found.held.gradients == 240
    found.ready("p0", 404, last=True)
    assert found.held.gradients == (51 + 30) * 4
    found.step()
    assert found.held.total == (51 + 30) * 4 + 2 * RECORDS


def test_over_nccl_a_gathered_parameter_takes_no_more_than_itself() -> None:
    assert told(sizes((100,), device="cuda"), "stage=3").forward(["p0"]) == 0


def test_small_parameters_that_stay_whole_count_beside_their_shards() -> None:
    found = told(sizes((100,), (6,)), "stage=3,persistence_threshold=10")
    assert found.held.parameters == (50 + 3 + 6) * 4
    found.forward(["p1"])
    assert found.held.parameters == (50 + 3 + 6) * 4


def test_half_precision_weights_have_masters_beside_them() -> None:
    found = told(THREE, "stage=2,half_weights=true", precision="bf16")
    assert (found.held.parameters, found.held.optimizer) == (400, 400)
    found = told(THREE, "stage=3,half_weights=true", precision="bf16")
    assert (found.held.parameters, found.held.optimizer) == (200, 400)


def test_on_a_gpu_what_is_offloaded_is_in_host_memory_and_on_a_cpu_there_is_one_memory() -> None:
    gpu = sizes((100,), (60,), (40,), device="cuda")
    found = told(gpu, "stage=2,offload_optimizer=cpu")
    assert found.offloaded_state
    assert (found.held.parameters, found.held.optimizer) == (800, 0)
    # The master and its gradient; weights on their way.
    assert (found.host.optimizer, found.host.gradients, found.host.buffers) == (400, 400, 400 + 400)
    assert told(gpu, "stage=3,offload_optimizer=cpu,offload_parameters=cpu").held.parameters == 0
    assert told(THREE, "stage=2,offload_optimizer=cpu").host.total == 0


def test_frozen_parameters_are_held_and_not_stepped() -> None:
    values = (ParameterSize("a", (100,), 4, True, True), ParameterSize("b", (60,), 4, False, True))
    for options, parameters in (("stage=2", 640), ("stage=3", 320)):
        found = told(ModelSize(values, 2), options)
        assert found.held.parameters == parameters
        assert [item.like for item in found.stepped()] == ["a"]


def test_a_parameter_without_a_gradient_is_given_zeros() -> None:
    for options, kept in (("stage=1", 400), ("stage=2", 400), ("stage=3", 400)):
        found = told(THREE, options)
        found.ready("p2", 160, last=True)
        passing = found.step()
        # They are gone at the end; the buffer's bytes, or the parts, were there in between.
        assert passing >= kept - 160, options
        assert found.held.total == told(THREE, options).held.total


def test_a_configuration_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}}')
    assert told(THREE, f"config={path}").held.parameters == 400 + 800
    with pytest.raises(StrategyError, match="has no effect at stage 0"):
        told(THREE, "stage=0,offload_optimizer=cpu")


@pytest.mark.parametrize("options", STAGES)
def test_a_large_model_on_4096_ranks_is_told_of_at_once(options: str) -> None:
    model = sizes(*[(4096, 1024), (1024, 4096), (1024,)] * 400, world_size=4096)
    start = time.perf_counter()
    found = told(model, options)
    stepped = sum(item.shape[0] for item in found.stepped() if options != "stage=0")
    found.prepare()
    for value in model.parameters:
        found.forward([value.name])
    backward(found)
    found.step()
    assert time.perf_counter() - start < 1.0
    if options != "stage=0":
        whole = sum(value.elements for value in model.parameters)
        assert whole / 4096 <= stepped <= whole / 4096 + 2 * len(model.parameters)


def test_the_footprint_needs_no_deepspeed() -> None:
    code = (
        "import sys, shardkit\n"
        "from shardkit import ModelSize, ParameterSize, Strategy\n"
        "from shardkit_deepspeed import DeepSpeedOptions, shardkit_footprint\n"
        "model = ModelSize((ParameterSize('a', (9,), 4, True, True),), 2)\n"
        "print(shardkit_footprint(model, Strategy('deepspeed'), DeepSpeedOptions()).held.parameters)\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "48\n"


# Against real ranks: the bytes of all tensors that there are.


def _layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 300, bias=False), nn.Linear(300, 401))
    model[2].weight.requires_grad_(False)
    return model


def _live(model: nn.Module | None = None) -> int:
    # Gloo's threads let go of what they sent a moment later.
    time.sleep(0.05)
    gc.collect()
    tensors = [
        value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu"
    ]
    # Past the session, which refuses looks at gradients between backward and step.
    grads = [torch._C.TensorBase.grad.__get__(value) for value in model.parameters()] if model is not None else []
    tensors += [value for value in grads if value is not None]
    return sum({value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensors}.values())


def _holds(strategy: str, accumulate: int) -> list[int]:
    """Return what a rank holds after prepare, after each backward of the second window, and after its step."""
    dist.init_process_group("gloo")
    batch = torch.ones(1, 256)
    base = _live()
    model = _layers()
    trained = [value for value in model.parameters() if value.requires_grad]
    session = shardkit.prepare(
        model,
        torch.optim.AdamW(trained),
        asked(strategy, accumulate),
    )
    held = [_live(model) - base]
    for window in range(2):
        for _ in range(accumulate):
            session.backward(session.model(batch).sum())
            if window:
                held.append(_live(model) - base)
            session.step()
    held.append(_live(model) - base)
    session.close()
    return held


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [*VARIANTS, *HALF])
def test_what_is_held_is_what_real_ranks_hold(options: str, accumulate: int) -> None:
    measured = run(_holds, options, accumulate, processes=2, timeout=60)
    values = [
        ParameterSize(name, tuple(value.shape), 4, value.requires_grad, value.requires_grad)
        for name, value in _layers().named_parameters()
    ]
    strategy = asked(options, accumulate)
    found = told(ModelSize(tuple(values), 2), options, accumulate=accumulate, precision=strategy.precision)
    expected = [found.held.total + found.host.total]
    state = 2 * 4 * sum(torch.Size(item.shape).numel() for item in found.stepped())
    for micro in range(accumulate):
        last = micro == accumulate - 1
        for value in reversed(values):
            if value.trainable:
                grown = options in ("stage=0", "stage=1") and micro > 0
                found.ready(value.name, 0 if grown else value.nbytes, last=last)
        expected.append(found.held.total + found.host.total + state)
    found.step()
    expected.append(found.held.total + found.host.total + state)
    if "stage=3" in options:
        # What it notes of parameters is no tensor.
        expected = [size - RECORDS * len(values) for size in expected]
    fullest = [max(rank[at] for rank in measured) for at in range(len(expected))]
    # What is left are single numbers, such as counts of steps, and in which order gradients came.
    assert fullest == pytest.approx(expected, abs=4096)


# And the most that they hold at a time.


def _workload() -> Workload:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=at % 2 == 0) for at in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Workload(model, optimizer, lambda built, batch: built(batch).square().mean(), _batches)


def _batches(size: int) -> Iterator[Tensor]:
    return repeat(torch.ones(size, 1024))


def _peak(options: str, accumulate: int) -> int:
    if not ctypes.CDLL(None).mallopt(-3, 128 * 1024):
        raise OSError("mallopt refuses to fix the threshold of mmap")
    dist.init_process_group("gloo")
    # What is loaded by whoever trains at all.
    small = shardkit.prepare(nn.Linear(4, 4), None, asked(options, 1))
    small.close()
    status = Path("/proc/self/status")

    def field(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name)) * 1024

    def train(width: int, steps: int) -> None:
        made = _workload() if width else Workload(*_tiny())
        session = shardkit.prepare(
            made.model,
            made.optimizer,
            asked(options, accumulate),
        )
        batches = made.batches(4)
        for _ in range(steps * accumulate):
            session.backward(made.loss(session.model, next(batches)))
            session.step()

    train(0, 2)
    gc.collect()
    base = field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(1024, 3)
    return field("VmHWM") - base


def _tiny() -> Any:
    model = nn.Linear(1024, 4)
    return model, torch.optim.AdamW(model.parameters(), fused=True), lambda built, batch: built(batch).mean(), _batches


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of a process's memory")
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [*STAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in OFFLOADS)])
def test_the_planned_peak_is_that_of_real_ranks_within_five_percent(options: str, accumulate: int) -> None:
    planned = shardkit.plan(
        _workload,
        strategies=[f"deepspeed:{options}"],
        precisions=["fp32"],
        accumulate=accumulate,
        batch_size=4,
        device="cpu",
    )
    measured = max(run(_peak, options, accumulate, processes=2, timeout=60))
    assert planned.rows[0].peak == pytest.approx(measured, rel=0.05)
