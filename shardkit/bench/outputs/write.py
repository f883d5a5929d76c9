"""A benchmark as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shardkit.bench._results import Bench
from shardkit.bench.outputs.csv_ import as_csv
from shardkit.bench.outputs.html import as_html
from shardkit.bench.outputs.json_ import as_json

NO_PLOT = "no bench.png: plots need matplotlib, which is not installed: pip install 'shardkit[tools]'"


def write(found: Bench, directory: Path) -> list[Path]:
    """Write ``bench.json``, ``bench.csv`` and ``bench.html``, and where matplotlib is installed ``bench.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("json", as_json(found) + "\n"), ("csv", as_csv(found)), ("html", as_html(found))):
        written.append(directory / f"bench.{name}")
        written[-1].write_text(text, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        from shardkit.bench.outputs.png import draw

        written.append(directory / "bench.png")
        draw(found, written[-1])
    return written
