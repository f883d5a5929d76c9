"""Every strategy on CUDA, one rank a device, against plain torch on the CPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import shardkit
from tests.cases._models import assert_close, batch, mlp, train_alone

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
