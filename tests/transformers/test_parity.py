"""Losses of the Trainer under each flag are those of the library's own under plain DDP."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit import testing
from tests.transformers import tiny

FLAGS: dict[str, dict[str, Any]] = {
    "--sharded_ddp": {"sharded_ddp": "simple"},
    "--strategy ddp": {"strategy": "ddp"},
    "--strategy fsdp": {"strategy": "fsdp"},
    "--strategy zero": {"strategy": "zero"},
    "--strategy deepspeed:stage=3": {"strategy": "deepspeed:stage=3"},
}
"""The flag's arguments, by what a user would write."""

LOSS = 1e-6
"""Relative, in float32: sums of two ranks in another order."""


@cache
def reference(model: str, folder: str) -> tiny.Training:
    return testing.run(tiny.own, folder, model)[0]


@pytest.mark.parametrize("model", tiny.MODELS)
@pytest.mark.parametrize("flag", FLAGS)
def test_losses_are_those_of_the_librarys_own_trainer(flag: str, model: str, tmp_path: Path) -> None:
    expected = reference(model, str(tmp_path))
    for seen in _run(flag, model, tmp_path):
        torch.testing.assert_close(seen.losses, expected.losses, rtol=LOSS, atol=0)
        torch.testing.assert_close(seen.norms, expected.norms, rtol=LOSS, atol=0)
        assert seen.rates == expected.rates
        torch.testing.assert_close(seen.metrics["eval_loss"], expected.metrics["eval_loss"], rtol=LOSS, atol=0)


def _run(flag: str, model: str, folder: Path) -> list[tiny.Training]:
    return testing.run(_train, str(folder), model, FLAGS[flag])


def _train(folder: str, model: str, arguments: dict[str, Any]) -> tiny.Training:
    return tiny.sharded(folder, model, **arguments)
