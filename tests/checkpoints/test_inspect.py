"""What a checkpoint holds can be told without its model, and damage is found wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import shardkit
from shardkit import checkpoints
from shardkit.cli import main
from shardkit.errors import CheckpointError
from tests.test_architecture import HEAVY, loaded_after


class Tied(nn.Module):
    """Two names of one matrix of 12 elements, a frozen vector of 5, a scale of no dimension, and a buffer of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (self.first(value) + self.second(value)).sum() * self.scale


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = Tied()
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.25)
    with shardkit.prepare(model, optimizer, "ddp:accumulate=2") as session:
        schedule = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda _: 1.0)
        for _ in range(2):
            for _ in range(2):
                session.backward(session.model(torch.ones(4)))
                session.step()
            session.save(folder, keep=2, objects={"schedule": schedule}, state={"epoch": 3, "best": torch.ones(7)})
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def shell(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert isinstance(result.exception, SystemExit | None)
    return result


def test_it_tells_who_wrote_it_when_and_what_is_in_it(made: Path) -> None:
    found = checkpoints.inspect(made / "step-00000001")
    assert found.path == made / "step-00000001"
    assert (found.damage, found.verified) == (None, True)
    assert (found.step, found.skipped_steps, found.world_size) == (1, 0, 1)
    assert found.strategy == {"backend": "ddp", "options": {}, "precision": "fp32", "accumulate": 2}
    assert found.versions["torch"] == torch.__version__
    assert found.saved is not None
    assert found.saved.startswith("20")
    assert (found.model, found.optimizer) == ("tests.checkpoints.test_inspect.Tied", "AdamW")
    assert (found.objects, found.state) == (("schedule",), ("best", "epoch"))
    assert found.aliases == {"second.weight": "first.weight"}
    assert [(group["parameters"], group["lr"], group["betas"]) for group in found.groups] == [(2, 0.25, [0.9, 0.999])]


def test_it_counts_parameters_once_and_lists_all_tensors(made: Path) -> None:
    found = checkpoints.inspect(made)
    assert found.step == 2
    assert found.parameters == 12 + 5 + 1
    weights = [tensor for tensor in found.tensors if tensor.file == "weights.safetensors"]
    assert {(tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in weights} == {
        ("first.weight", "float32", (3, 4), 48),
        ("frozen", "float32", (5,), 20),
        ("scale", "float32", (), 4),
        ("seen", "float32", (2,), 8),
    }
    assert {tensor.name for tensor in found.tensors if tensor.file == "optimizer.safetensors"} == {
        f"{name}/{key}" for name in ("first.weight", "scale") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found.sizes == {path.name: path.stat().st_size for path in found.path.glob("*.safetensors")}


def flip(path: Path, at: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


FILES = ("weights.safetensors", "optimizer.safetensors", "state.safetensors", "ranks.safetensors", "checkpoint.json")


@pytest.mark.parametrize("name", FILES)
def test_one_bit_anywhere_is_found_with_the_files_name(folder: Path, name: str) -> None:
    path = folder / "step-00000002"
    size = (path / name).stat().st_size
    for at in (0, size // 3, size // 2, size - 1):
        flip(path / name, at)
        found = checkpoints.inspect(path)
        assert name in (found.damage or ""), at
        assert not found.verified
        flip(path / name, at)
    assert checkpoints.inspect(path).damage is None


def test_a_file_that_is_missing_or_short_is_damage_and_what_is_known_is_told(folder: Path) -> None:
    path = folder / "step-00000002"
    data = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(data[:-1])
    found = checkpoints.inspect(path, verify=False)
    assert found.damage is not None
    assert "optimizer.safetensors" in found.damage
    assert (found.step, found.optimizer) == (2, "AdamW")
    (path / "optimizer.safetensors").unlink()
    found = checkpoints.inspect(path)
    assert found.damage is not None
    assert "optimizer.safetensors" in found.damage


def test_without_verifying_no_element_is_read(folder: Path) -> None:
    path = folder / "step-00000002"
    flip(path / "weights.safetensors", (path / "weights.safetensors").stat().st_size - 1)
    found = checkpoints.inspect(path, verify=False)
    assert (found.damage, found.verified) == (None, False)


def test_progress_ends_with_all_bytes(made: Path) -> None:
    told: list[tuple[int, int]] = []
    found = checkpoints.inspect(made, progress=lambda done, total: told.append((done, total)))
    total = sum(tensor.bytes for tensor in found.tensors)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_where_there_is_none_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoints.inspect(tmp_path)
    result = shell(tmp_path / "nothing")
    assert result.exit_code == 2
    assert "there is no checkpoint in" in result.stderr
    assert "it doesn't exist" in result.stderr


def test_another_format_is_no_damage(folder: Path) -> None:
    manifest = folder / "step-00000002" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"format":2', '"format":99'))
    result = shell(folder / "step-00000002")
    assert result.exit_code == 2
    assert "of format 99" in result.stderr


def test_the_command_tells_all_of_a_directory_and_what_is_in_the_last(made: Path) -> None:
    result = shell(made)
    assert result.exit_code == 0, result.output
    for words in ("step-00000001", "step-00000002", "ddp:accumulate=2 on 1 rank", "18 parameters", "schedule", "whole"):
        assert words in result.stdout
    assert "first.weight/exp_avg" not in result.stdout
    listed = shell(made, "--tensors").stdout
    assert "first.weight/exp_avg" in listed
    assert "(3, 4)" in listed
    assert "not verified" in shell(made, "--no-verify").stdout


def test_the_command_ends_with_1_where_one_is_damaged(folder: Path) -> None:
    flip(
        folder / "step-00000001" / "weights.safetensors",
        -1 + (folder / "step-00000001/weights.safetensors").stat().st_size,
    )
    result = shell(folder)
    assert result.exit_code == 1
    assert "step-00000001/weights.safetensors' is damaged" in result.stdout
    assert shell(folder / "step-00000002").exit_code == 0
    assert shell(folder, "--no-verify").exit_code == 0


def test_json_is_alone_on_stdout(made: Path) -> None:
    first, second = json.loads(shell(made, "--json").stdout)["checkpoints"]
    assert (first["step"], second["step"]) == (1, 2)
    assert second["damage"] is None
    assert second["verified"] is True
    assert second["tensors"] == 4 + 6 + 1 + len(
        [1 for _ in checkpoints.inspect(made).tensors if _.file == "ranks.safetensors"]
    )
    (only,) = json.loads(shell(made / "step-00000001", "--json", "--tensors").stdout)["checkpoints"]
    assert {"name": "scale", "file": "weights.safetensors", "dtype": "float32", "shape": [], "bytes": 4} in only[
        "tensors"
    ]


def test_help_imports_nothing_heavy() -> None:
    for command in ("inspect", "export"):
        told = "import contextlib, io; from shardkit.cli import main\nwith contextlib.redirect_stdout(io.StringIO()): "
        assert not loaded_after(f"{told}main([{command!r}, '--help'], standalone_mode=False)") & HEAVY
