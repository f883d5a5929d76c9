"""Backends that go wrong, for the tools to tell of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit._registry import _manager
from tests.tools import _faulty


@pytest.fixture(scope="package")
def faulty_backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put the backends ``faulty``, ``absent`` (its library is missing) and ``broken`` (exits at import) on the path."""
    folder = _faulty.write(tmp_path_factory.mktemp("backends"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("faulty", "absent"):
        _manager().unregister(name=f"backend {name}")
        sys.modules.pop(f"their_{name}", None)
