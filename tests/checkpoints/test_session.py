"""Checkpoints: exact, whole or not there, and refused where they don't fit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit import _processes
from shardkit.errors import CheckpointError, StateError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd, step, train


def dropped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 8))


def prepared(strategy: str, model: nn.Module) -> shardkit.Session:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return shardkit.prepare(model, optimizer, shardkit.Strategy.parse(strategy))


def interrupted(strategy: str, folder: Path, resume: bool) -> dict[str, torch.Tensor]:
    """Train four steps and save after two; or go on from there in a process of its own."""
    if not resume:
        with prepared(strategy, dropped()) as session:
            train(session, steps=2)
            session.save(folder)
            return train(session, steps=2, first=2)
    torch.manual_seed(99)
    with prepared(strategy, dropped()) as session:
        session.load(folder)
        return train(session, steps=2, first=2)


def test_a_run_resumed_in_fresh_processes_has_the_same_bits(strategy: str, tmp_path: Path) -> None:
    first = run(interrupted, strategy, tmp_path / "c", False)[0]
    second = run(interrupted, strategy, tmp_path / "c", True)[0]
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def opened(model: nn.Module | None = None, strategy: str = "ddp") -> shardkit.Session:
    model = W(1) if model is None else model
    return shardkit.prepare(model, sgd(model), strategy)


def test_a_schedule_goes_on_since_its_rate_is_saved(tmp_path: Path) -> None:
    with opened() as session:
        session.optimizer.param_groups[0]["lr"] = 0.025
        session.save(tmp_path)
        session.optimizer.param_groups[0]["lr"] = 0.5
        session.load(tmp_path)
        assert session.optimizer.param_groups[0]["lr"] == 0.025


def test_loading_drops_the_gradients_of_a_window_in_progress(tmp_path: Path) -> None:
    with opened(strategy="ddp:accumulate=2") as session:
        session.save(tmp_path)
        session.backward(session.model([100.0]))
        session.load(tmp_path)
        for value in (1.0, 3.0):
            step(session, session.model([value]))
        assert torch.allclose(session.full_weights()["w"], torch.tensor([0.8]))


def test_a_second_save_replaces_the_first_and_leaves_no_file_behind(tmp_path: Path) -> None:
    with opened() as session:
        session.save(tmp_path)
        step(session, session.model([1.0]))
        session.save(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
        session.load(tmp_path)
        assert session.steps == 1


def fails(session: shardkit.Session, folder: Path, message: str) -> None:
    before = session.full_weights()
    with pytest.raises(CheckpointError, match=message):
        session.load(folder)
    assert all(torch.equal(before[name], value) for name, value in session.full_weights().items())


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with opened() as session:
        fails(session, tmp_path / "nothing", "there is no checkpoint in .*nothing")


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip", "flip the header"])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "ranks.safetensors"])
def test_damage_is_reported_with_the_files_name(tmp_path: Path, damage: str, name: str) -> None:
    model = W(1)
    with shardkit.prepare(model, torch.optim.Adam(model.parameters()), "ddp") as session:
        step(session, session.model([1.0]))
        file = session.save(tmp_path) / name
        data = file.read_bytes()
        if damage == "remove":
            file.unlink()
        elif damage == "truncate":
            file.write_bytes(data[:-1])
        else:
            at = len(data) - 1 if damage == "flip" else 12
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        fails(session, tmp_path, f"can't read .*{name}" if damage == "remove" else f"{name}.* is damaged")


def test_a_manifest_that_is_damaged_or_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    with opened() as session:
        manifest = session.save(tmp_path) / "checkpoint.json"
        text = manifest.read_text()
        manifest.write_text(text.replace('"format":2', '"format":99'))
        fails(session, tmp_path, "of format 99.*reads up to 2")
        manifest.write_text(text.replace('"step":0', '"step":7'))
        fails(session, tmp_path, "checkpoint.json' is damaged: its checksum")
        manifest.write_text("{")
        fails(session, tmp_path, "checkpoint.json' is damaged")


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    with opened() as session:
        session.save(tmp_path)
    with opened(nn.Linear(1, 1)) as session:
        message = r"the checkpoint has 'w' \(1,\) .*; this session has 'bias' \(1,\), 'weight' \(1, 1\) that"
        fails(session, tmp_path, message)
    longer = W(1)
    longer.w = nn.Parameter(torch.ones(2))
    with opened(longer) as session:
        fails(session, tmp_path, r"other shapes: 'w' \(1,\) in the checkpoint and \(2,\) here")
    other = W(1)
    with shardkit.prepare(other, torch.optim.Adam(other.parameters()), "ddp") as session:
        fails(session, tmp_path, "of the optimizer SGD, and this session's is Adam")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with opened() as session:
        with pytest.raises(CheckpointError, match=r"can't write .*file"):
            session.save(tmp_path / "file" / "below")
        assert step(session, session.model([1.0]))


def alone(folder: Path, what: str) -> str:
    """Call it on rank 0 only, then train on both ranks."""
    _processes.RENDEZVOUS_SECONDS = 2
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        told = ""
        if session.rank == 0:
            try:
                getattr(session, what)(*([folder] if what in ("save", "load") else []))
            except StateError as error:
                told = str(error)
        step(session, session.model([session.rank + 1]))
        assert torch.allclose(session.full_weights()["w"], torch.tensor([0.85]))
        session.save(folder)
        session.load(folder)
        dist.barrier()
    return told


@pytest.mark.parametrize("what", ["save", "load", "full_weights"])
def test_a_call_on_one_rank_only_says_so_and_training_goes_on(tmp_path: Path, what: str) -> None:
    told = run(alone, tmp_path, what)[0]
    assert f"{what} is collective: call it on all ranks. Rank 0 waited 2 s for rank 1 of 2" in told


def test_random_state_goes_on_where_it_was(tmp_path: Path) -> None:
    with opened() as session:
        session.save(tmp_path)
        drawn = random.random(), torch.rand(3), torch.randn(2)
        session.load(tmp_path)
        again = random.random(), torch.rand(3), torch.randn(2)
    assert drawn[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(drawn[1:], again[1:], strict=True))


def test_the_path_of_one_checkpoint_that_is_not_there_is_no_fresh_start(tmp_path: Path) -> None:
    with opened() as session:
        assert session.load(tmp_path / "none", missing_ok=True) is None
        session.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"step-00000099.*doesn't exist"):
            session.load(tmp_path / "step-00000099", missing_ok=True)


def test_a_parameter_that_the_optimizer_was_not_given_is_told_of_with_the_cure(tmp_path: Path) -> None:
    with opened(nn.Linear(1, 1)) as session:
        session.save(tmp_path)
    model = nn.Linear(1, 1)
    with shardkit.prepare(model, sgd(nn.ParameterList([model.bias])), "ddp") as session:  # type: ignore[arg-type]
        fails(session, tmp_path, "'weight'.* that this session lacks; the model has 'weight', but the optimizer lacks")
