"""Parametrization of the suite by what is declared, and the launches that its tests share."""

from __future__ import annotations

import pytest

from shardkit import testing
from shardkit.testing import _ahead

from .cells import Cell, Trace, cells
from .ranks import Failure, record
from .strategies import declared

WORLD_SIZES = (1, 2, 4)

# The server has no path to the tests, so what is slow to import is named.
testing.preload("pytest", "transformers.models.t5.modeling_t5", "transformers.models.gpt2.modeling_gpt2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize(
            ("variant", "world_size", "cell"),
            [
                pytest.param(
                    arm.strategy, world_size, cell, id=f"{arm}-ranks={world_size}-{cell}", marks=_marks(arm.missing)
                )
                for arm in declared()
                for world_size in WORLD_SIZES
                for cell in cells(world_size)
            ],
        )
    if "sharded" in metafunc.fixturenames:
        metafunc.parametrize(
            "sharded",
            [
                pytest.param(arm.strategy, id=str(arm), marks=_marks(arm.missing))
                for arm in declared()
                if "parameters" in arm.shards
            ],
        )


@pytest.fixture
def ranks(variant: str, world_size: int, cell: Cell, request: pytest.FixtureRequest) -> list[Trace]:
    """Each rank's trace of the cell."""
    wanted = _ahead.selected(request.session, request.function, "variant", "world_size")
    outcome = _ahead.result((variant, world_size), wanted, _recorded)[cell]
    if isinstance(outcome, Failure):
        pytest.fail(outcome.text, pytrace=False)
    return outcome


def _recorded(strategy: str, world_size: int) -> dict[Cell, list[Trace] | Failure]:
    return record(strategy, world_size, cells(world_size))


def _marks(missing: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=missing)] if missing else []
