"""The Trainer's flags on CUDA, over NCCL: losses of the library's own Trainer there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit import testing
from tests.transformers import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CUDA = {"use_cpu": False, "dataloader_pin_memory": True}


@pytest.mark.parametrize(
    "flag",
    [
        {"sharded_ddp": "simple"},
        {"sharded_ddp": "zero_dp_2"},
        {"sharded_ddp": "zero_dp_3"},
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "deepspeed:stage=2"},
        {"strategy": "deepspeed:stage=3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", tiny.MODELS)
def test_losses_on_cuda_are_those_of_the_librarys_own_trainer(flag: dict[str, Any], model: str, tmp_path: Path) -> None:
    expected = testing.run(_own, str(tmp_path / "own"), model)[0]
    for seen in testing.run(_sharded, str(tmp_path / "sharded"), model, flag):
        torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(seen.norms, expected.norms, rtol=1e-5, atol=0)


def _own(folder: str, model: str) -> tiny.Training:
    return tiny.own(folder, model, **ON_CUDA)


def _sharded(folder: str, model: str, flag: dict[str, Any]) -> tiny.Training:
    return tiny.sharded(folder, model, **ON_CUDA, **flag)
