"""A benchmark as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.bench._results import Bench
from shardkit.bench.outputs import _bars, _words
from shardkit.parity.outputs import _page
from shardkit.parity.outputs._tables import Cell, Column, Table


def as_html(found: Bench) -> str:
    """Return the page, with its pictures; it loads nothing from elsewhere."""
    return _page.page("Throughput, memory and the largest batch", _words.title(found), "\n".join(_parts(found)))


def _parts(found: Bench) -> Iterator[str]:
    yield _page.verdict(_words.title(found), "")
    yield f'<p class="dim">{_page.escaped(_words.machine(found))}</p>'
    yield _page.table(_words.table(found))
    yield _page.paragraphs([_words.noise(found)])
    told = list(_words.notes(found))
    if told:
        yield f"<ul>{''.join(f'<li>{_page.escaped(note)}</li>' for note in told)}</ul>"
    for panel in _bars.panels(found):
        yield f"<h2>{_page.escaped(panel.title)}</h2><figure>{_bars.as_svg(panel)}</figure>"
    yield "<h2>How it was measured</h2>"
    yield _page.paragraphs(list(_words.method(found)))
    if found.command:
        yield f"<pre>{_page.escaped(found.command)}</pre>"
    for row in found.rows:
        if row.details:
            yield _page.folded(f"{row.name}: {row.outcome}", f"<pre>{_page.escaped(row.details)}</pre>")
    yield _page.folded("Settings and versions", _page.table(_settings(found)))


def _settings(found: Bench) -> Table:
    held = {**found.settings, **found.hardware, **found.versions}
    rows = [[Cell(name.replace("_", " ")), Cell(str(value))] for name, value in held.items() if value is not None]
    return Table("", [Column("name"), Column("value", folds=True)], rows)
