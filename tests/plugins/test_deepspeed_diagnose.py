"""What the doctor knows of DeepSpeed: found from files and versions, without importing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardkit_deepspeed import _diagnose


def test_versions_whose_stage_3_races_over_gloo_are_a_problem() -> None:
    for bad in ("0.14.5", "0.18.9", "0.19.7"):
        found = _diagnose.version(bad)
        assert found.level == "problem"
        assert 'pip install "deepspeed>=0.19.8"' in found.advice
    assert _diagnose.version("0.19.8").level == "fine"
    assert "clips gradients" in _diagnose.version("0.19.8").message


def test_a_lock_that_nobody_holds_is_a_problem_and_says_how_old_it_is(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    [found] = _diagnose.build_locks(tmp_path, lock.stat().st_mtime + 3 * 3600, Path("/proc"))
    assert found.level == "problem"
    assert "3 hours old" in found.message
    assert found.advice == f"rm {lock}"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads open files from /proc")
def test_a_lock_that_a_process_holds_is_a_note_that_names_it(tmp_path: Path) -> None:
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    with lock.open("w"):
        [found] = _diagnose.build_locks(tmp_path, lock.stat().st_mtime + 30, Path("/proc"))
    assert found.level == "note"
    assert f"process {os.getpid()}" in found.message
    assert "30 seconds" in found.message


def test_no_lock_is_fine(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert [found.level for found in _diagnose.build_locks(folder, 0.0, Path("/proc"))] == ["fine"]


def test_extensions_lie_where_torch_builds_them() -> None:
    assert _diagnose.extensions_folder({"TORCH_EXTENSIONS_DIR": "/x/y"}) == Path("/x/y")
    assert _diagnose.extensions_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/torch_extensions")
    assert _diagnose.extensions_folder({}) == Path.home() / ".cache" / "torch_extensions"


def test_missing_build_tools_are_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = _diagnose.tools()
    assert found.level == "note"
    assert "ninja and a C++ compiler not found" in found.message
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert _diagnose.tools().level == "fine"


def test_the_variable_of_the_shared_memory_op_is_a_note() -> None:
    assert _diagnose.local_size({"LOCAL_SIZE": "2"}).level == "note"
    assert _diagnose.local_size({}).level == "fine"


def test_a_machine_without_deepspeed_is_told_of_locks_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert {found.check for found in _diagnose.diagnose()} == {"DeepSpeed's build locks"}
