"""Every strategy on CUDA, one rank a device, against plain torch on the CPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shardkit
from shardkit.testing.cases._models import assert_close, batch, mlp, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none"),
]

STEPS = 4


def trained(strategy: str) -> tuple[dict[str, Tensor], float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    separator = "," if ":" in strategy else ":"
    with shardkit.prepare(model, optimizer, f"{strategy}{separator}max_grad_norm=0.1") as session:
        for index in range(STEPS):
            session.backward(session.model(batch(index, session.rank).to(device)).square().mean())
            assert session.step()
        return session.full_weights(), session.grad_norm


def half(precision: str, settings: str) -> tuple[dict[str, Tensor], set[torch.dtype], int]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    strategy = f"deepspeed:{settings},precision={precision},half_weights=true,loss_scale=1024"
    with shardkit.prepare(model, optimizer, strategy) as session:
        kinds = {value.dtype for value in model.parameters()}
        for index in range(STEPS):
            session.backward(session.model(batch(index, session.rank).to(device)).square().mean())
            assert session.step()
        # An overflow on one rank halves the session's scale, and moves nothing.
        held = session.full_weights()
        if precision == "fp16":
            session.backward(session.model(batch(0, 0).to(device)).square().mean() * (1e38 if not session.rank else 1))
            assert not session.step()
            assert session.scaler.scale == 512
            assert all(torch.equal(held[name], value) for name, value in session.full_weights().items())
    assert all(torch.equal(held[name], value.cpu()) for name, value in model.state_dict().items())
    return held, kinds, session.skipped_steps


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize(
    "settings", ["stage=1", "stage=2", "stage=3", "stage=2,offload_optimizer=cpu", "stage=3,offload_optimizer=cpu"]
)
def test_half_weights_on_cuda_train_near_float32(settings: str, precision: str, dtype: torch.dtype) -> None:
    pytest.importorskip("deepspeed")
    ranks = torch.cuda.device_count()
    found = shardkit.launch(half, precision, settings, processes=ranks, timeout=300)
    reference = mlp()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_alone(reference, optimizer, STEPS, parts=ranks)
    for weights, kinds, skipped in found:
        # Four steps of Adam go 0.04; one element of a small gradient may go another way for a step and back.
        assert_close(weights, expected, 2e-2)
        assert kinds == {dtype}
        assert skipped == (precision == "fp16")


def test_a_run_on_cuda_is_that_of_one_process_on_the_cpu(strategy: str) -> None:
    ranks = torch.cuda.device_count()
    # A fork of a process that has touched CUDA can't use it: launch starts anew.
    found = shardkit.launch(trained, strategy, processes=ranks, timeout=300)
    reference = mlp()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_alone(reference, optimizer, STEPS, parts=ranks, max_norm=0.1)
    for weights, norm in found:
        assert_close(weights, expected, 1e-5)
        assert norm == found[0][1]


def test_parameters_split_by_fairscale_on_cuda_train_as_one_process_on_the_cpu() -> None:
    pytest.importorskip("fairscale")
    ranks = torch.cuda.device_count()
    found = shardkit.launch(trained, "fairscale:shard=parameters", processes=ranks, timeout=300)
    reference = mlp()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_alone(reference, optimizer, STEPS, parts=ranks, max_norm=0.1)
    for weights, norm in found:
        assert_close(weights, expected, 1e-5)
        assert norm == found[0][1]


def trained_low(strategy: str, precision: str) -> tuple[dict[str, Tensor], list[bool], float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    separator = "," if ":" in strategy else ":"
    moved = []
    with shardkit.prepare(model, optimizer, f"{strategy}{separator}precision={precision},loss_scale=1024") as session:
        # Windows whose last one is short, and an overflow of the last rank in fp16.
        for window in session.windows(range(3)):
            for index in window:
                output = session.model(batch(index, session.rank).to(device))
                assert output.dtype is torch.float32
                loss = output.square().mean()
                overflow = precision == "fp16" and index == 1 and session.rank == session.world_size - 1
                session.backward(loss * 1e37 if overflow else loss)
            moved.append(session.step())
        return session.full_weights(), moved, 1.0 if session.scaler is None else session.scaler.scale


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_on_cuda_is_near_float32_and_skips_on_all_ranks(strategy: str, precision: str) -> None:
    ranks = torch.cuda.device_count()
    found = shardkit.launch(trained_low, strategy, precision, processes=ranks, timeout=300)
    reference = mlp()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for index in (0, 2) if precision == "fp16" else (0, 1, 2):
        optimizer.zero_grad()
        reference(torch.cat([batch(index, part) for part in range(ranks)])).square().mean().backward()
        optimizer.step()
    for weights, moved, scale in found:
        # Three steps of Adam at 1e-2: a gradient near zero may take another sign in low precision.
        assert_close(weights, dict(reference.state_dict()), 6e-2)
        assert moved == ([True, False, True] if precision == "fp16" else [True] * 3)
        assert scale == (512.0 if precision == "fp16" else 1.0)


def recorded(strategy: str, path: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with shardkit.prepare(model, optimizer, strategy) as session, shardkit.parity.record(session, path):
        for index in range(STEPS):
            session.backward(session.model(batch(index, session.rank).to(device)).square().mean())
            session.step()


def recorded_on_cpu(path: str) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with shardkit.prepare(model, optimizer, "ddp") as session, shardkit.parity.record(session, path):
        for index in range(STEPS):
            session.backward(session.model(batch(index, session.rank)).square().mean())
            session.step()


def test_a_trace_of_a_run_on_gpus_is_that_of_the_same_run_on_the_cpu_but_for_round_off(
    strategy: str, tmp_path: Path
) -> None:
    ranks = min(2, torch.cuda.device_count())
    shardkit.launch(recorded, strategy, str(tmp_path / "cuda"), processes=ranks, timeout=300)
    shardkit.launch(recorded_on_cpu, str(tmp_path / "cpu"), processes=ranks, timeout=300)
    found = shardkit.parity.compare(*(shardkit.parity.Trace.load(tmp_path / name) for name in ("cpu", "cuda")))
    assert found.verdict in ("identical", "round-off"), found.parting
