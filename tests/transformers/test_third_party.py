"""The Trainer over a backend of somebody else."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import shardkit
from shardkit import testing
from tests.transformers import tiny

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "shardkit-allreduce" / "src"


def over_the_example(folder: str) -> tiny.Training:
    sys.path.insert(0, str(EXAMPLE))
    import shardkit_allreduce

    shardkit.register(shardkit_allreduce, "allreduce")
    return tiny.sharded(folder, strategy="allreduce")


def test_a_backend_of_somebody_else_trains_as_the_librarys_own_trainer(tmp_path: Path) -> None:
    expected = testing.run(tiny.own, str(tmp_path))[0]
    for seen in testing.run(over_the_example, str(tmp_path)):
        torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(seen.norms, expected.norms, rtol=1e-6, atol=0)
