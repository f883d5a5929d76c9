"""Amounts of memory as text."""

from __future__ import annotations

import pytest

from shardkit._sizes import format_bytes, parse_bytes
from shardkit.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("24GiB", 24 * 2**30),
        (" 512 MiB ", 512 * 2**20),
        ("8GB", 8 * 10**9),
        ("1.5kib", 1536),
        ("2TiB", 2**41),
        ("0.3MB", 300_000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes_are_read_from_numbers_and_text(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 G iB", "-1GiB", "24Gb/s", "1e3", "24XB", "nan"])
def test_what_is_no_amount_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(InputError, match=r"budget reads a number and a unit.*such as '24GiB'"):
        parse_bytes(text, "budget")


@pytest.mark.parametrize("size", [0, -5, "0", "0GiB", "0.1B"])
def test_an_amount_is_above_nothing(size: int | str) -> None:
    with pytest.raises(InputError, match="above 0 bytes"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [1.5, None, True, b"5"])
def test_an_amount_is_a_whole_number_or_text(size: object) -> None:
    with pytest.raises(InputError, match="is a number of bytes or text"):
        parse_bytes(size)  # type: ignore[arg-type]


def test_bytes_are_told_in_the_unit_that_fits() -> None:
    told = [format_bytes(size) for size in (0, 1023, 1536, 2**20, 1.5 * 2**30, 2**41)]
    assert told == ["0 B", "1023 B", "1.5 KiB", "1 MiB", "1.5 GiB", "2 TiB"]
