"""What the doctor knows of FairScale, found from its version, without importing it."""

from __future__ import annotations

import importlib.metadata

import pytest
from shardkit_fairscale import _diagnose


def test_the_version_that_exits_at_import_is_a_problem_unless_its_module_is_there() -> None:
    found = _diagnose.version("0.4.7", pygit2=False)
    assert found.level == "problem"
    assert "exits the interpreter" in found.message
    assert "exits the interpreter" not in _diagnose.version("0.4.7", pygit2=True).message


def test_older_versions_are_a_problem_and_the_last_is_fine() -> None:
    assert _diagnose.version("0.4.12", pygit2=False).level == "problem"
    assert _diagnose.version("0.4.13", pygit2=False).level == "fine"


def test_nothing_is_said_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert _diagnose.diagnose() == []
