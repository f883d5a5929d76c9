"""Strategies as objects, as strings and from files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from shardkit import Strategy
from shardkit._prepare import resolve
from shardkit.errors import StrategyError


def test_a_string_holds_fields_of_the_strategy_and_options_of_the_backend() -> None:
    strategy = Strategy.parse("any:stage=3, accumulate=4,max_grad_norm=1e-1,track_grad_norm=true,seed=7")
    assert strategy == Strategy(
        "any", accumulate=4, max_grad_norm=0.1, track_grad_norm=True, seed=7, options={"stage": "3"}
    )


def test_a_name_alone_is_a_strategy() -> None:
    assert Strategy.parse("any") == Strategy("any")


@pytest.mark.parametrize(
    "original",
    [
        Strategy("any"),
        Strategy("any", accumulate=3, max_grad_norm=0.5, seed=1, on_nonfinite="skip"),
        Strategy("any", track_grad_norm=True, options={"stage": "2"}),
    ],
)
def test_a_strategy_comes_back_from_its_string_and_from_a_pickle(original: Strategy) -> None:
    assert Strategy.parse(str(original)) == original
    assert pickle.loads(pickle.dumps(original)) == original


def test_a_strategy_cannot_be_changed() -> None:
    strategy = Strategy("any", options={"stage": 1})
    with pytest.raises(AttributeError):
        strategy.accumulate = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        strategy.options["stage"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "reads 'backend'"),
        (":a=1", "reads 'backend'"),
        ("any:", "reads 'backend'"),
        ("any:stage", "'stage' of strategy 'any:stage' does not read 'name=value'"),
        ("any:stage=", "does not read 'name=value'"),
        ("any:a=1,a=2", "sets 'a' twice"),
        ("any:accumulate=0", "at least 1, not 0"),
        ("any:accumulate=two", "a whole number, not 'two'"),
        ("any:accumulate=1.5", "a whole number, not '1.5'"),
        ("any:max_grad_norm=0", "above 0 and finite, or None to not clip, not 0.0"),
        ("any:max_grad_norm=-1", "above 0"),
        ("any:max_grad_norm=inf", "finite"),
        ("any:max_grad_norm=nan", "finite"),
        ("any:track_grad_norm=maybe", "true or false, not 'maybe'"),
        ("any:precision=fp8", "not 'fp8'"),
        ("any:seed=-1", "from 0"),
        ("any:on_nonfinite=ignore", "not 'ignore'"),
    ],
)
def test_a_string_that_is_no_strategy_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulate": True},
        {"accumulate": 2.0},
        {"accumulate": "2"},
        {"max_grad_norm": "1"},
        {"max_grad_norm": True},
        {"track_grad_norm": 1},
        {"seed": 1.5},
        {"options": ["stage"]},
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(StrategyError, match=next(iter(fields))):
        Strategy("any", **fields)  # type: ignore[arg-type]


def test_a_whole_number_passes_for_a_norm() -> None:
    assert Strategy("any", max_grad_norm=1).max_grad_norm == 1.0


def test_files_hold_strategies(tmp_path: Path) -> None:
    table = {"backend": "any", "accumulate": 4, "max_grad_norm": 1, "options": {"stage": 3}}
    expected = Strategy("any", accumulate=4, max_grad_norm=1.0, options={"stage": 3})
    (tmp_path / "s.json").write_text(json.dumps(table))
    (tmp_path / "s.toml").write_text('backend = "any"\naccumulate = 4\nmax_grad_norm = 1\n[options]\nstage = 3\n')
    for name in ("s.json", "s.toml"):
        assert Strategy.load(tmp_path / name) == expected
        assert resolve(tmp_path / name) == expected
        assert resolve(str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", "{", "is not JSON"),
        ("s.toml", "= 1", "is not TOML"),
        ("s.json", "[1]", "holds a list"),
        ("s.json", '{"backend": "any", "acumulate": 2}', "did you mean 'accumulate'"),
        ("s.json", '{"backend": 3}', "not 3"),
        ("s.json", '{"backend": "any", "accumulate": 0}', "s.json: strategy field 'accumulate'"),
        ("s.json", '{"colour": 3}', "neither a strategy"),
        ("s.json", "{}", "neither a strategy"),
    ],
)
def test_a_file_that_is_no_strategy_is_refused_with_its_path(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StrategyError, match=message) as caught:
        resolve(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(StrategyError, match=r"there is no strategy file 'nowhere\.json'"):
        resolve("nowhere.json")


def test_what_is_neither_text_nor_path_is_refused() -> None:
    with pytest.raises(StrategyError, match="not a int"):
        resolve(3)  # type: ignore[arg-type]
