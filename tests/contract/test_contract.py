"""docs/contract.md says what the tests of the cases see."""

from __future__ import annotations

import pytest

from shardkit.testing._suite import SEEN
from shardkit.testing._told import difference
from shardkit.testing.cases import _table
from shardkit.testing.cases._table import Case, load_cases
from tests.contract.page import COMMAND, PAGE, PRODUCT, RAW_RUN, gaps, read, render
from tests.contract.product import cells, strategies
from tests.contract.ranks import _joined
from tests.contract.raw import RAW


def test_the_table_has_every_case_and_strategy_and_no_other() -> None:
    told = gaps(read(PRODUCT), strategies(), list(load_cases()))
    assert not told, f"{PRODUCT.name} is out of date ({told[0]} and so on): run {COMMAND} --product"


def test_the_table_of_raw_libraries_has_every_case_that_can_be_asked() -> None:
    told = gaps(read(RAW_RUN), list(RAW), [name for name, case in load_cases().items() if case.raw])
    assert not told, f"{RAW_RUN.name} is out of date ({told[0]} and so on): run {COMMAND} --raw"


def test_the_page_is_rendered_from_the_recorded_runs() -> None:
    assert PAGE.read_text() == render(), f"{PAGE.name} is out of date: run {COMMAND} --render"


def test_the_page_is_the_same_whichever_cases_were_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    page = render()
    last_first = sorted(_table._CASES.items(), key=lambda item: item[1].topic, reverse=True)
    monkeypatch.setattr(_table, "_CASES", dict(last_first))
    assert render() == page


def test_each_cell_is_what_the_tests_of_the_cases_saw(strategy: str) -> None:
    """The committed cell, right or refused with its message, is that of this very run."""
    if strategy not in SEEN:
        pytest.skip(f"needs the tests of tests/backends under {strategy} in the same run")
    seen, recorded = cells(strategy, SEEN[strategy]), read(PRODUCT)["cells"].get(strategy, {})
    differ = [name for name, cell in seen.items() if recorded.get(name) != cell]
    assert not differ, (
        f"{PRODUCT.name} has for {differ[0]} {recorded.get(differ[0])}, and this run saw {seen[differ[0]]} "
        f"({len(differ)} such): run {COMMAND} --product"
    )


def test_no_cell_of_shardkit_is_wrong_or_a_hang() -> None:
    found = {cell["kind"] for column in read(PRODUCT)["cells"].values() for cell in column.values()}
    assert found <= {"right", "refused", "left out"}


def test_a_name_reads_as_a_sentence() -> None:
    def c01_gradients_are_averaged(prepare: object, rank: int) -> None: ...

    def a_loss_is_read(prepare: object, rank: int) -> None: ...

    assert Case(c01_gradients_are_averaged, or_refused=False, raw=True).sentence == "C01 gradients are averaged"
    assert Case(a_loss_is_read, or_refused=False, raw=True).sentence == "A loss is read"


@pytest.mark.parametrize(
    ("kinds", "joined"),
    [
        (("right", "right"), "right"),
        (("right", "wrong"), "wrong"),
        (("error", "error"), "error"),
        (("error", "right"), "partial"),
        (("death", "error"), "partial"),
        (("hang", "error"), "hang"),
        (("hang", "wrong"), "wrong"),
        (("left", "wrong"), "wrong"),
        (("left", "hang"), "hang"),
    ],
)
def test_the_outcome_of_two_ranks_is_the_worse(kinds: tuple[str, str], joined: str) -> None:
    """A rank that is left waiting in the case's own collective says nothing of the library."""
    pair = [{"kind": kind, "text": f"text of {kind}"} for kind in kinds]
    assert _joined(pair)["kind"] == joined
    assert _joined(pair[::-1])["kind"] == joined


def test_a_wrong_value_is_told_beside_the_right_one() -> None:
    import torch

    assert difference({"actual": torch.tensor([0.7]), "expected": [0.85]}) == ("0.7", "0.85")
    assert difference({"actual": torch.zeros(0), "expected": torch.ones(2)}) == ("shape (0,)", "(2,)")
