"""What fsdp says of its memory: by hand, and beside the peak of real ranks."""

from __future__ import annotations

import pytest
from shardkit_fsdp._footprint import unit_names

import shardkit
from shardkit import ModelSize
from shardkit._footprint import ParameterSize
from shardkit.testing import run
from tests.planner.test_footprints_of_whole_weights import BATCH, MIB, peak, told, workload

SCRATCH = 2 * MIB


def stack(world_size: int) -> ModelSize:
    """Return a stem of 8 MiB and three blocks of 16."""
    rows = {"stem.weight": 8, "blocks.0.weight": 16, "blocks.1.weight": 16, "blocks.2.weight": 16}
    return ModelSize(
        tuple(ParameterSize(name, (size, MIB // 4), 4, True, True) for name, size in rows.items()), world_size
    )


def test_one_block_is_whole_beside_what_no_block_holds() -> None:
    held = told(stack(4), "fsdp")
    assert held.held.parameters == 14 * MIB
    # The stem stays; what was gathered for one block goes as the next one comes.
    assert held.forward(["stem.weight"]) == 8 * MIB
    assert held.held.parameters == (14 + 8) * MIB
    for at in range(3):
        assert held.forward([f"blocks.{at}.weight"]) == 16 * MIB
        assert held.held.parameters == (14 + 8 + 16) * MIB
    held.backward(["blocks.2.weight"])
    # The whole gradient beside the copy in which it is averaged, of which a quarter stays.
    assert held.ready("blocks.2.weight", 16 * MIB, last=True) == (16 - 4 + 16) * MIB + SCRATCH
    assert (held.held.gradients, held.held.parameters) == (4 * MIB, (14 + 8) * MIB)
    assert [item.shape for item in held.stepped()] == [(2 * MIB // 4,), *[(4 * MIB // 4,)] * 3]
    held.step()
    assert (held.held.gradients, held.held.parameters) == (0, 14 * MIB)


def test_host_memory_holds_the_shards() -> None:
    held = told(stack(4), "fsdp:offload=cpu")
    assert (held.held.parameters, held.host.parameters, held.offloaded_state) == (0, 14 * MIB, True)
    held.backward(["blocks.2.weight"])
    held.ready("blocks.2.weight", 16 * MIB, last=True)
    assert (held.held.gradients, held.host.gradients) == (0, 4 * MIB)


def test_blocks_are_told_by_names() -> None:
    names = ["shared.weight", "encoder.block.0.layer.0.q", "encoder.block.0.bias", "encoder.block.0.layer.1.w"]
    names += ["encoder.block.1.layer.0.q", "encoder.block.1.layer.1.w", "head.0.weight"]
    assert list(unit_names(names, "auto").values()) == ["", *["encoder.block.0"] * 3, *["encoder.block.1"] * 2, ""]
    assert set(unit_names(names, "none").values()) == {""}
    assert unit_names(names, "encoder.block.*")["encoder.block.1.layer.0.q"].startswith("encoder.block.1")
    assert unit_names(names, "encoder.block.*")["head.0.weight"] == ""


@pytest.mark.parametrize("spec", ["fsdp", "fsdp:wrap=none"])
def test_the_planned_peak_is_within_a_tenth_of_that_of_real_ranks(spec: str) -> None:
    row = shardkit.plan(workload, strategies=[spec], precisions=["fp32"], batch_size=BATCH, device="cpu").rows[0]
    assert row.peak is not None
    assert row.peak == pytest.approx(max(run(peak, spec)), rel=0.1)
