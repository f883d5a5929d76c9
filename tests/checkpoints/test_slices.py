"""Each rank writes what it owns and reads what it needs; nobody holds the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoints._write import EXTENT
from shardkit.testing import run

WIDTH, LAYERS = 1024, 6
MODEL = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the weights; AdamW holds twice as much."""


def counting(call: Callable[..., int], total: list[int]) -> Callable[..., int]:
    def counted(*args: Any) -> int:
        moved = call(*args)
        total[0] += moved
        return moved

    return counted


def peak() -> int:
    """Return the most memory that this process has held, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def moved(strategy: str, folder: Path) -> dict[str, int]:
    """Return how many bytes this rank wrote and read, and how far its memory grew meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    with shardkit.prepare(model, optimizer, strategy) as session:
        for _ in range(2):
            session.backward(session.model(torch.ones(2, WIDTH)).square().mean())
            session.step()
        written, read = [0], [0]
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        with mock.patch("os.pwrite", counting(os.pwrite, written)):
            session.save(folder)
        saving = peak() - before
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        with mock.patch("os.preadv", counting(os.preadv, read)):
            session.load(folder)
        return {"written": written[0], "read": read[0], "saving": saving, "loading": peak() - before}


HELD = {"ddp": 3.0, "fairscale": 2.0, "deepspeed:stage=1": 2.0, "deepspeed:stage=3": 1.5}
"""What each of two ranks holds, in copies of the weights: the weights, and AdamW's state of whatever it steps."""


@pytest.mark.parametrize("name", HELD)
def test_a_rank_moves_its_share_and_needs_no_memory_for_it(name: str, tmp_path: Path) -> None:
    for rank in run(moved, name, tmp_path):
        # The files hold three copies of the weights, and each rank writes half of them.
        assert rank["written"] == pytest.approx(1.5 * MODEL, rel=0.02)
        # Once into place; and to check it, all that it alone needs and half of what both do.
        held = HELD[name] * MODEL
        assert held <= rank["read"] <= held + 1.5 * MODEL + 4 * EXTENT
        parameter = WIDTH * WIDTH * 4
        slack = 2 * EXTENT  # a buffer for reading, and the allocator's own
        assert rank["saving"] <= parameter + slack
        assert rank["loading"] <= parameter + slack
