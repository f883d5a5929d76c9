"""The listing says what each backend shards, and how to install what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from shardkit.errors import BackendNotFoundError
from shardkit.tools import listing


def test_every_claim_to_a_name_is_listed_and_what_is_wrong_with_it(faulty_backends: Path) -> None:
    found = {backend["name"]: backend for backend in listing.listing()}
    assert found["ddp"]["installed"]
    assert found["faulty"]["variants"] == [
        {
            "strategy": "faulty",
            "summary": "as it is",
            "shards": ["optimizer"],
            "offloads": [],
            "devices": ["cpu"],
            "elsewhere": "",
        }
    ]
    assert found["faulty"]["precisions"] == ["fp32", "bf16"]
    assert not found["absent"]["installed"]
    assert 'pip install "no-such-library>=1.2"' in found["absent"]["problem"]
    assert "SystemExit" in found["broken"]["problem"]


def test_the_tables_hold_all_of_it(faulty_backends: Path) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        for part in listing.tables(listing.listing()):
            console.print(part)
    for text in ("ddp", "faulty", "optimizer", "no-such-library", "broken: ", "fp32, bf16"):
        assert text in capture.get()


def test_options_have_their_type_default_unit_and_doc() -> None:
    found = {option["name"]: option for option in listing.options("ddp")}
    bucket = found["bucket_cap_mb"]
    assert (bucket["type"], bucket["default"], bucket["unit"]) == ("a number or None", None, "MiB")
    assert "bucket" in bucket["doc"]
    assert found["gradient_as_bucket_view"]["default"] is True


def test_options_of_an_unknown_backend_are_refused() -> None:
    with pytest.raises(BackendNotFoundError, match="did you mean 'ddp'"):
        listing.options("dpd")
