"""A badge that says how much of the suite a backend passes."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import InputError

if TYPE_CHECKING:
    from shardkit.testing._conformance import Conformance

LABEL = "shardkit"
_PASSED, _FAILED = "#2e7d32", "#c62828"
_CHARACTER = 6.6
"""Pixels of a character of 11 pixels in height, on average."""


def check_badge(path: Path | None) -> None:
    """Raise unless a badge can be written to this path.

    Raises:
        InputError: its name ends neither in ``.svg`` nor in ``.json``, or its folder isn't there.
    """
    if path is None:
        return
    if path.suffix not in (".svg", ".json"):
        raise InputError(f"a badge is a picture, .svg, or what a badge service reads, .json; not {path.name!r}")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no directory to write a badge into")


def write_badge(found: Conformance, path: Path) -> None:
    """Write the badge: a picture, or the JSON from which shields.io makes one (its "endpoint" badge)."""
    message, colour = _message(found), _PASSED if found.passed else _FAILED
    if path.suffix == ".json":
        told = {"schemaVersion": 1, "label": LABEL, "message": message, "color": colour, "isError": not found.passed}
        path.write_text(json.dumps(told) + "\n")
        return
    left, right = (round(len(text) * _CHARACTER) + 12 for text in (LABEL, message))
    title = html.escape(f"{LABEL}: {message}")
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#444"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{html.escape(LABEL)}</text>'
        f'<text x="{left + right / 2}" y="14">{html.escape(message)}</text></g></svg>\n'
    )


def _message(found: Conformance) -> str:
    counts = found.counts
    if counts["failed"]:
        return f"{counts['failed']} of {sum(counts.values())} wrong"
    left = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{counts['right']} right, {counts['refused']} refused{left}"
