"""The files are those of the safetensors library, and values come back from a manifest as they were."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardkit.checkpoints._layout import DTYPES, Spec, lay_out, memory_of, read_layout
from shardkit.checkpoints._values import decode, encode, tensors_of
from shardkit.errors import CheckpointError


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {str(dtype): (torch.randn(3, 5) * 3).to(dtype) for dtype in DTYPES}
    return {**found, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "odd": torch.ones(7, dtype=torch.uint8)}


def written(path: Path, values: dict[str, torch.Tensor]) -> None:
    layout = lay_out({name: Spec(value.dtype, tuple(value.shape)) for name, value in values.items()}, {"format": "pt"})
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    for name, value in values.items():
        at = layout.places[name]
        data[at : at + value.numel() * value.element_size()] = memory_of(value)
    path.write_bytes(data)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and bytes(memory_of(one)) == bytes(memory_of(other))


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    written(tmp_path / "file", tensors())
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors().keys()
    assert all(same(found[name], value) for name, value in tensors().items())
    with safe_open(tmp_path / "file", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "file", {"a": "b"})
    layout = read_layout(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    assert len(data) == layout.size
    for name, value in tensors().items():
        assert layout.specs[name] == Spec(value.dtype, tuple(value.shape))
        assert data[layout.places[name] :].startswith(bytes(memory_of(value)))


def test_every_tensor_lies_at_a_multiple_of_its_elements_size() -> None:
    layout = lay_out({name: Spec(value.dtype, tuple(value.shape)) for name, value in tensors().items()}, {})
    assert all(layout.places[name] % spec.itemsize == 0 for name, spec in layout.specs.items())


def test_complex_numbers_of_double_precision_are_pairs_of_doubles(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    written(tmp_path / "file", {"z": value})
    assert torch.equal(torch.view_as_complex(load_file(tmp_path / "file")["z"]), value)
    assert read_layout(tmp_path / "file", frozenset({"z"})).specs["z"] == Spec(torch.complex128, (2,))


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x10" + b"\x00" * 7 + b"{}", b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_header_that_makes_no_sense_is_damage(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match="file' is damaged"):
        read_layout(tmp_path / "file")


class Kind(IntEnum):
    ONE = 1


VALUES: list[Any] = [
    None,
    True,
    -(2**80),
    "text \N{SNOWMAN}",
    0.1 + 0.2,
    1e-320,
    [1, [2.5, None], ()],
    (1, ("a", b"\x00\xff")),
    {"a": {"b": [1]}, "$a": 1},
    {1: "one", (2, 3): "pair", 2.5: None},
    OrderedDict(b=1, a=2),
    Counter({30: 1, 80: 2}),
    {1, 2},
    frozenset({"x"}),
    torch.bfloat16,
    {"$tensor": "looks like one"},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    told = json.loads(json.dumps(encode(value, "v", {})))
    found = decode(told, {})
    assert found == value
    assert type(found) is type(value)


def test_numbers_that_json_lacks_come_back() -> None:
    found = decode(json.loads(json.dumps(encode([math.inf, -math.inf, math.nan, -0.0], "v", {}), allow_nan=False)), {})
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert math.copysign(1, found[3]) == -1


def test_numbers_of_numpy_and_enums_are_plain_ones() -> None:
    found = encode([np.float32(0.5), np.int64(3), np.bool_(True), Kind.ONE], "v", {})
    assert found == [0.5, 3, True, 1]
    assert [type(item) for item in found] == [float, int, bool, int]


def test_tensors_are_named_by_their_place() -> None:
    held: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), (torch.zeros(1),)], "b": np.arange(3)}
    told = json.loads(json.dumps(encode(value, "state", held)))
    assert list(held) == ["state/a/0", "state/a/1/0", "state/b"] == tensors_of(told)
    found = decode(told, held)
    assert torch.equal(found["a"][0], torch.ones(2))
    assert torch.equal(found["a"][1][0], torch.zeros(1))
    assert isinstance(found["b"], np.ndarray)
    assert found["b"].tolist() == [0, 1, 2]


def test_two_tensors_at_places_of_one_name_stay_apart() -> None:
    held: dict[str, torch.Tensor] = {}
    value = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    found = decode(encode(value, "v", held), held)
    assert (found["a/b"].item(), found["a"]["b"].item()) == (0, 1)


def test_what_cannot_be_held_is_named_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"state/a/1 is a builtins\.object, and a checkpoint holds numbers"):
        encode({"a": [1, object()]}, "state", {})
