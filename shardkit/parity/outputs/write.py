"""Where what was found goes: to the terminal, to stdout as JSON, and into a directory."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import InputError
from shardkit.parity._results import Comparison, Report

if TYPE_CHECKING:
    from rich.console import Console

    from shardkit.parity._bisect import Bisection


def check(output: Path | None) -> None:
    """Raise, before anything is run, unless a report can be written into the directory.

    Raises:
        InputError: it can't be made, or there is no matplotlib for the plots.
    """
    if output is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--output writes plots, which need matplotlib, and it isn't installed; install it with: "
            'pip install "shardkit[tools]"'
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: {str(output)!r} can't be made: {error.strerror}") from error


def emit(found: Comparison | Report | Bisection, console: Console, *, as_json: bool, output: Path | None) -> None:
    """Print what was found, as JSON or for a reader, and write it into the directory."""
    from shardkit.parity import outputs
    from shardkit.parity._bisect import Bisection

    if isinstance(found, Bisection):
        if as_json:
            console.file.write(outputs.as_json(found) + "\n")
        else:
            for one in found.tried:
                console.print(f"{one.version:<12} {one.verdict:<14} {one.reason}", markup=False, soft_wrap=True)
            console.print(found.summary, markup=False, highlight=False, soft_wrap=True)
        return
    if output is not None:
        (output / "report.json").write_text(outputs.as_json(found) + "\n", encoding="utf-8")
        (output / "report.xml").write_text(outputs.as_junit(found), encoding="utf-8")
        (output / "report.html").write_text(outputs.as_html(found), encoding="utf-8")
    if as_json:
        console.file.write(outputs.as_json(found) + "\n")
    else:
        outputs.show(found, console)
        if output is not None:
            console.print(f"wrote {output}/report.json, report.xml and report.html", markup=False, highlight=False)


def as_text(found: Comparison) -> str:
    """Return what is shown of a comparison on a terminal, as plain text."""
    from rich.console import Console

    from shardkit.parity import outputs

    text = io.StringIO()
    outputs.show(found, Console(file=text, width=110))
    return text.getvalue()
