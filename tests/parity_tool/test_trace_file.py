"""A trace file is read whole and as it was written, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardkit.errors import TraceError
from shardkit.parity import Trace

from .conftest import Load


@pytest.fixture
def written(trace: Load, tmp_path: Path) -> Path:
    return trace("sgd").save(tmp_path / "run.safetensors")


def test_what_was_written_is_read(trace: Load, written: Path) -> None:
    found, wanted = Trace.load(written), trace("sgd")
    assert found.facts == wanted.facts
    assert found.gradients.equal(wanted.gradients)
    assert found.losses.equal(wanted.losses)
    assert found.final_weights.keys() == wanted.final_weights.keys()
    assert all(found.final_weights[name].equal(value) for name, value in wanted.final_weights.items())


@pytest.mark.parametrize("kept", [0, 4, 100, 3000, -1])
def test_a_truncated_file_is_refused(written: Path, kept: int) -> None:
    written.write_bytes(written.read_bytes()[:kept])
    with pytest.raises(TraceError, match=r"run\.safetensors"):
        Trace.load(written)


def test_a_longer_file_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes() + b"\0")
    with pytest.raises(TraceError, match=r"run\.safetensors"):
        Trace.load(written)


@pytest.mark.parametrize("place", [-1, -5000])
def test_an_edited_number_is_refused(written: Path, place: int) -> None:
    content = bytearray(written.read_bytes())
    content[place] ^= 1
    written.write_bytes(content)
    with pytest.raises(TraceError, match=r"run\.safetensors' is damaged, or was edited"):
        Trace.load(written)


def test_an_edited_fact_is_refused(written: Path) -> None:
    content = written.read_bytes()
    edited = content.replace(b'\\"class\\": \\"SGD\\"', b'\\"class\\": \\"SGE\\"')
    assert edited != content
    written.write_bytes(edited)
    with pytest.raises(TraceError, match=r"run\.safetensors' is damaged, or was edited"):
        Trace.load(written)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(TraceError, match=r"other\.safetensors' is no trace"):
        Trace.load(path)
    path.write_text("not a tensor in it")
    with pytest.raises(TraceError, match=r"other\.safetensors"):
        Trace.load(path)
    with pytest.raises(TraceError, match=r"none\.safetensors"):
        Trace.load(tmp_path / "none.safetensors")


def test_a_newer_format_is_refused(written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content.replace(b'"shardkit.trace":"1"', b'"shardkit.trace":"2"'))
    assert written.read_bytes() != content
    with pytest.raises(TraceError, match=r"run\.safetensors' is of format 2, and this shardkit reads 1"):
        Trace.load(written)


def test_a_header_without_metadata_or_facts_is_refused(written: Path) -> None:
    content = written.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    del header["__metadata__"]["facts"]
    text = json.dumps(header).encode()
    written.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(TraceError, match=r"run\.safetensors"):
        Trace.load(written)


def test_numbers_that_are_not_finite_are_kept(trace: Load, tmp_path: Path) -> None:
    changed = trace("sgd").losses.clone()
    changed[0, 0, 0] = torch.inf
    path = Trace(**{**vars(trace("sgd")), "losses": changed}).save(tmp_path / "run.safetensors")
    assert Trace.load(path).losses.equal(changed)
