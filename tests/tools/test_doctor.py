"""The doctor finds what makes training hang, fail or compute wrong numbers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardkit import Finding
from shardkit.errors import PluginError
from shardkit.tools import doctor


def test_variables_of_a_launcher_that_are_half_set_are_a_problem() -> None:
    assert doctor.launcher_variables({}).level == "fine"
    half = doctor.launcher_variables({"RANK": "0", "WORLD_SIZE": "2"})
    assert half.level == "problem"
    assert "without LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in half.message
    assert "unset RANK WORLD_SIZE" in half.advice


def test_whole_variables_of_a_launcher_are_a_note_and_impossible_ones_a_problem() -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert doctor.launcher_variables(whole).level == "note"
    assert doctor.launcher_variables({**whole, "RANK": "2"}).level == "problem"
    assert doctor.launcher_variables({**whole, "RANK": "first"}).level == "problem"


def test_a_busy_master_port_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = doctor.master_port({"MASTER_PORT": str(server.getsockname()[1])})
    assert busy.level == "problem"
    assert "in use" in busy.message
    assert doctor.master_port({"MASTER_PORT": "port"}).level == "problem"
    assert doctor.master_port({}).level == "fine"


def test_this_machine_can_connect_to_itself() -> None:
    assert doctor.local_port().level == "fine"


def test_a_host_name_that_does_not_resolve_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = doctor.host_name()
    assert found.level == "problem"
    assert "/etc/hosts" in found.advice


def test_more_threads_than_the_cores_carry_are_a_note() -> None:
    assert doctor.threads({"OMP_NUM_THREADS": "8"}, 8).level == "note"
    assert doctor.threads({"OMP_NUM_THREADS": "4"}, 8).level == "fine"
    assert doctor.threads({"OMP_NUM_THREADS": "1"}, 1).level == "fine"
    assert doctor.threads({"OMP_NUM_THREADS": "many"}, 8).level == "problem"


def test_old_files_in_shared_memory_are_found_and_new_ones_left_alone(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"x" * 2**20)
    now = (tmp_path / "segment").stat().st_mtime
    assert doctor.shared_memory(tmp_path, now + 60).level == "fine"
    old = doctor.shared_memory(tmp_path, now + 2 * 3600)
    assert old.level in ("note", "problem")
    assert "1 files of yours of 1 MiB" in old.message
    assert doctor.shared_memory(tmp_path / "none", now).level == "fine"


def test_an_old_torch_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.torch_version().level == "fine"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    assert doctor.torch_version().level == "note"


def test_plugins_bring_their_own_findings_and_broken_ones_are_findings(faulty_backends: Path) -> None:
    found = {finding.check: finding for finding in doctor.plugins()}
    assert found["backend ddp"].level == "fine"
    assert found["faulty's check"] == Finding("faulty's check", "problem", "it leaks", "mend it")
    assert found["backend broken"].level == "problem"
    assert "SystemExit" in found["backend broken"].message
    assert found["backend absent"].level == "note"
    assert "pip install" in found["backend absent"].message


def test_a_check_of_a_plugin_that_fails_is_a_finding(faulty_backends: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> list[Finding]:
        raise OSError("no such file")

    monkeypatch.setattr("shardkit._registry.diagnose", fail)
    found = {finding.check: finding for finding in doctor.plugins()}
    assert found["backend ddp"].level == "problem"
    assert "OSError: no such file" in found["backend ddp"].message


def test_findings_of_another_level_or_type_are_refused(faulty_backends: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit import _registry

    with pytest.raises(PluginError, match="one of"):
        Finding("check", "bad", "message")  # type: ignore[arg-type]
    monkeypatch.setattr(_registry, "call", lambda claim, hook: ["text"])
    with pytest.raises(PluginError, match="returns a list of Findings"):
        _registry.diagnose("ddp")


def test_a_plugin_without_a_check_of_its_own_has_none() -> None:
    from shardkit._registry import diagnose

    assert diagnose("ddp") == []


def test_the_doctor_changes_nothing_in_the_environment() -> None:
    before = dict(os.environ)
    assert {finding.check for finding in doctor.examine()} >= {"torch", "MASTER_PORT", "host name", "shared memory"}
    assert dict(os.environ) == before
