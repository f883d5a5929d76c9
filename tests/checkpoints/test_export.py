"""Weights as other programs read them: from_pretrained of the transformers library, and safetensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn

import shardkit
from shardkit import checkpoints, workloads
from shardkit.cli import main
from shardkit.errors import CheckpointError, DamageError, InputError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd

MODELS = {"t5-tiny": "t5_tiny", "gpt2-tiny": "gpt2_tiny"}


def trained(strategy: str, name: str, folder: Path) -> dict[str, Any]:
    """Train a step, export and save; return the logits of the session in evaluation, and its whole weights."""
    work = workloads.load(name)
    with shardkit.prepare(work.model, work.optimizer, strategy) as session:
        batches = work.batches(2)
        session.backward(work.loss(session.model, [next(batches), next(batches)][session.rank]))
        session.step()
        session.export(folder / "exported")
        session.export(folder / "half", dtype=torch.bfloat16)
        session.save(folder / "saved")
        with session.evaluate() as model:
            logits = model(**inputs(name)).logits
        return {"logits": logits, "weights": session.full_weights()}


def inputs(name: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(24).view(2, 12)
    return {"input_ids": tokens, "decoder_input_ids": tokens + 30} if name == "t5-tiny" else {"input_ids": tokens}


def loaded(name: str, folder: Path) -> nn.Module:
    """Return what from_pretrained makes of a folder, if it misses nothing and nothing is left over."""
    import transformers

    kind = {"t5-tiny": transformers.T5ForConditionalGeneration, "gpt2-tiny": transformers.GPT2LMHeadModel}[name]
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_computes_what_the_session_did(strategy: str, name: str, tmp_path: Path) -> None:
    if name != "t5-tiny" and strategy not in ("ddp", "deepspeed:stage=3"):
        pytest.skip("the second model is loaded under two strategies: the files are the same")
    first, second = run(trained, strategy, name, tmp_path)
    for folder in (tmp_path / "exported", exported(tmp_path / "saved", tmp_path / "of the checkpoint")):
        model = loaded(name, folder)
        with torch.no_grad():
            logits = model(**inputs(name)).logits
        assert torch.equal(logits, first["logits"])
        assert torch.equal(logits, second["logits"])
        fresh = workloads.load(name).model
        assert model.config.to_diff_dict() | {"architectures": 0, "dtype": 0} == fresh.config.to_diff_dict() | {
            "architectures": 0,
            "dtype": 0,
        }
        assert model.config.architectures == [type(fresh).__name__]
        assert model.generation_config.to_diff_dict() == fresh.generation_config.to_diff_dict()
    half = loaded(name, tmp_path / "half").state_dict()
    assert all(torch.equal(half[key], value.to(torch.bfloat16)) for key, value in first["weights"].items())
    # A checkpoint's weights by safetensors alone: all that a state dict has, but of tied tensors one name.
    (path,) = (tmp_path / "saved").glob("step-*")
    alone = safetensors.torch.load_file(path / "weights.safetensors")
    tied = checkpoints.inspect(path).aliases
    assert alone.keys() | tied.keys() == first["weights"].keys()
    assert all(torch.equal(alone[tied.get(key, key)], value) for key, value in first["weights"].items())


def exported(source: Path, folder: Path) -> Path:
    result = CliRunner().invoke(main, ["export", str(source), str(folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {folder}\n"
    return folder


def halved(strategy: str, folder: Path) -> None:
    model = nn.Linear(5, 3, bias=False)
    nn.init.constant_(model.weight, 1 / 3)
    with shardkit.prepare(model, sgd(model), strategy) as session:
        session.backward(session.model(torch.ones(2, 5)).sum())
        session.step()
        session.export(folder / "exported")
        session.save(folder / "saved")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_weights_in_half_precision_the_full_ones_are_exported(stage: int, tmp_path: Path) -> None:
    run(halved, f"deepspeed:stage={stage},precision=bf16,half_weights=true", tmp_path)
    # The gradient is that of two ones; bfloat16 would have 0.1328 or 0.1338.
    wanted = torch.full((3, 5), 1 / 3) - 0.1 * torch.full((3, 5), 2.0)
    for folder in (tmp_path / "exported", exported(tmp_path / "saved", tmp_path / "again")):
        assert torch.equal(safetensors.torch.load_file(folder / "model.safetensors")["weight"], wanted)


class Mixed(nn.Module):
    """Tied, frozen and odd-sized parameters, one of no dimension, buffers, and numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 7, bias=False)
        self.second = nn.Linear(7, 7, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("wide", torch.rand(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(value))).square().mean() * self.scale


def stepped(strategy: str, folder: Path) -> dict[str, torch.Tensor]:
    model = Mixed()
    trainable = [value for value in model.parameters() if value.requires_grad]
    with shardkit.prepare(model, torch.optim.AdamW(trainable, lr=0.01), strategy) as session:
        torch.manual_seed(session.rank)
        session.backward(session.model(torch.rand(4, 7)))
        session.step()
        session.export(folder / "exported")
        session.export(folder / "half", dtype=torch.float16)
        session.save(folder / "saved")
        return session.full_weights()


@pytest.mark.parametrize("plan", ["ddp", "fairscale", "deepspeed:stage=1", "deepspeed:stage=3"])
def test_other_models_load_it_by_safetensors(plan: str, tmp_path: Path) -> None:
    weights = run(stepped, plan, tmp_path)[0]
    for folder in (tmp_path / "exported", exported(tmp_path / "saved", tmp_path / "again")):
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        model = Mixed()
        for value in model.state_dict().values():
            value.zero_()
        assert safetensors.torch.load_model(model, folder / "model.safetensors") == (set(), [])
        found = model.state_dict()
        assert found.keys() == weights.keys()
        assert all(
            torch.equal(value, weights[name]) and value.dtype is weights[name].dtype for name, value in found.items()
        )
    with safetensors.safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        for name in file.keys():  # noqa: SIM118 - it has no other way
            wanted = weights[name].half() if weights[name].is_floating_point() else weights[name]
            assert torch.equal(file.get_tensor(name), wanted)


@pytest.fixture
def session() -> Iterator[shardkit.Session]:
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as prepared:
        yield prepared


def test_a_directory_that_holds_something_else_is_left_alone(session: shardkit.Session, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    saved = session.save(tmp_path / "saved")
    for target in (tmp_path, tmp_path / "saved", saved):
        before = sorted(path.name for path in target.iterdir())
        with pytest.raises(CheckpointError, match=r"isn't empty, and holds no export: it has '.+'\. Name another"):
            session.export(target)
        with pytest.raises(CheckpointError, match="isn't empty, and holds no export"):
            checkpoints.export(saved, target)
        assert sorted(path.name for path in target.iterdir()) == before
    result = CliRunner().invoke(main, ["export", str(saved), str(tmp_path)])
    assert result.exit_code == 2
    assert "isn't empty" in result.stderr


def test_an_export_is_replaced_and_what_was_put_beside_it_stays(session: shardkit.Session, tmp_path: Path) -> None:
    session.export(tmp_path / "e")
    (tmp_path / "e" / "tokenizer.json").write_text("{}")
    (tmp_path / "e" / ".partial-0123").mkdir()
    session.backward(session.model([1.0]))
    session.step()
    session.export(tmp_path / "e")
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert torch.equal(safetensors.torch.load_file(tmp_path / "e/model.safetensors")["w"], session.full_weights()["w"])


def test_damage_is_not_exported(session: shardkit.Session, tmp_path: Path) -> None:
    saved = session.save(tmp_path / "saved")
    data = bytearray((saved / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "weights.safetensors").write_bytes(data)
    with pytest.raises(DamageError, match=r"weights\.safetensors"):
        checkpoints.export(saved, tmp_path / "e")
    assert list((tmp_path / "e").iterdir()) == []


def test_what_cannot_be_is_said(session: shardkit.Session, tmp_path: Path) -> None:
    for call in (session.export, lambda target, **given: checkpoints.export(tmp_path / "saved", target, **given)):
        session.save(tmp_path / "saved")
        with pytest.raises(InputError, match=r"such as torch\.bfloat16, not torch\.int8"):
            call(tmp_path / "e", dtype=torch.int8)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoints.export(tmp_path / "nothing", tmp_path / "e")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"can't write '.*file'"):
        session.export(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"can't write '.*file'"):
        checkpoints.export(tmp_path / "saved", tmp_path / "file")
    assert not (tmp_path / "e").exists()


def alone(folder: Path) -> str:
    from shardkit import _processes

    _processes.RENDEZVOUS_SECONDS = 2
    model = W(1)
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        told = ""
        if session.rank == 0:
            try:
                session.export(folder)
            except shardkit.errors.StateError as error:
                told = str(error)
        torch.distributed.barrier()
        session.export(folder)
    return told


def test_on_one_rank_only_it_says_so(tmp_path: Path) -> None:
    assert "export is collective: call it on all ranks" in run(alone, tmp_path / "e")[0]
    assert torch.equal(safetensors.torch.load_file(tmp_path / "e/model.safetensors")["w"], torch.ones(1))
