"""What was found, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.parity._results import Comparison, Diagnosis, Measured, Report, Row
from shardkit.parity.outputs import _page, _plots, _tables, _words


def as_html(found: Comparison | Report) -> str:
    """Return the page of a comparison, a suite or an upgrade, with its plots; it loads nothing from elsewhere.

    Raises:
        MissingLibraryError: matplotlib isn't installed.
    """
    title = _words.title(found)
    if isinstance(found, Comparison):
        kind, parts = "Two runs compared", _comparison_page(found)
    elif found.kind == "upgrade":
        kind, parts = "Upgrade", _upgrade_page(found)
    else:
        kind, parts = "Suite", _suite_page(found)
    body = "\n".join(parts)
    return _page.page(f"{kind}: {title}", title, body)


def _comparison_page(found: Comparison) -> Iterator[str]:
    yield _page.verdict(_words.verdict(found), _tables.TONES.get(found.verdict, ""))
    yield f"<p>a: <code>{_page.escaped(found.a)}</code><br>b: <code>{_page.escaped(found.b)}</code></p>"
    yield from _comparison(found, "comparison", ("a", "b"), "h2")
    yield _legend("gap", "round-off", "ULP")


def _comparison(found: Comparison, name: str, names: tuple[str, str], heading: str = "h3") -> Iterator[str]:
    """Yield where two runs part and why: sentences, pictures and tables."""
    yield _page.paragraphs([*_words.partings(found, names), _words.ends(found)])
    if found.diagnoses:
        yield f"<{heading}>What the numbers say</{heading}>"
        yield _diagnoses([("", diagnosis) for diagnosis in found.diagnoses])
    yield _figure(_plots.curves(f"{name}-curves", found, names))
    picture = _plots.heat(f"{name}-heat", found)
    yield _figure(picture)
    if picture is None and found.gaps is not None:
        yield "<p>The weights are the same in every step.</p>"
    if found.verdict != "identical":
        yield _page.table(_tables.growth(found, names))
    if found.differences:
        table = _tables.differences(found, names)
        yield _page.folded(f"{table.title} ({len(table.rows)})", _page.table(table), opened=len(table.rows) <= 12)


def _suite_page(found: Report) -> Iterator[str]:
    yield from _top(found)
    yield _page.table(_tables.suite(found), _links(found))
    yield _reasons(found)
    yield from _found(found)
    yield _figure(_plots.distances("distances", found))
    yield _figure(_plots.losses("losses", found))
    yield from _performance(found)
    yield from _rows(found)
    yield from _environments(found)
    yield _legend("distance", "baseline", "gap", "ULP", "round-off", "repeatable", "control")


def _upgrade_page(found: Report) -> Iterator[str]:
    yield from _top(found)
    yield _page.table(_tables.upgrade(found), _links(found))
    table = _tables.changed(found)
    if table.rows:
        yield _page.folded(f"{table.title} ({len(table.rows)})", _page.table(table), opened=len(table.rows) <= 20)
    else:
        yield "<p>No setting that could be read changed its value.</p>"
    yield from _found(found)
    yield _figure(_plots.losses("losses", found))
    yield from _performance(found)
    yield from _rows(found)
    yield from _environments(found)
    yield _legend("gap", "ULP", "round-off", "repeatable", "control", "speed", "distance", "baseline")


def _top(found: Report) -> Iterator[str]:
    yield _page.verdict(_words.line(found.summary), {0: "good", 1: "bad"}.get(found.exit_code, "warn"))
    if found.settings:
        yield f'<p class="dim">{_page.escaped(_words.settings(found))}</p>'


def _found(found: Report) -> Iterator[str]:
    """Yield diagnoses and failures."""
    diagnoses = list(_words.diagnoses(found))
    if diagnoses:
        yield "<h2>What the numbers say</h2>"
        yield _diagnoses(diagnoses)
    failures = _words.failures(found)
    if failures:
        yield "<h2>What failed</h2>"
    for failed in failures:
        details = failed.failure.details
        yield (
            _page.folded(str(failed), f"<pre>{_page.escaped(_words.printed(details))}</pre>")
            if details
            else f'<p class="bad">{_page.escaped(str(failed))}</p>'
        )


def _performance(found: Report) -> Iterator[str]:
    yield _figure(_plots.bars("bars", found))
    table = _tables.performance(found)
    yield _page.folded(table.title, _page.table(table))


def _rows(found: Report) -> Iterator[str]:
    """Yield a part for each strategy that there is more to tell of."""
    yield "<h2>Strategy by strategy</h2>"
    for place, row in enumerate(found.rows):
        body = "\n".join(part for part in _row(row, f"row{place}", found) if part)
        tone = _tables.TONES.get(row.verdict, "")
        head = f'{_page.escaped(_words.strategy(row))}: <span class="{tone}">{_page.escaped(row.verdict)}</span>'
        apart = row.verdict in ("different", "no parity")
        yield _page.folded("", body, opened=apart, name=f"row{place}", head=head)


def _row(row: Row, name: str, found: Report) -> Iterator[str]:
    yield _page.paragraphs([_words.line(row.reason)])
    if row.comparison is not None:
        names = ("before", "after") if row.after is not None else ("a", "b")
        if row.after is None:
            told = f"a: {_words.line(row.comparison.a)}", f"b: {_words.line(row.comparison.b)}"
            yield _page.paragraphs(list(told))
        yield from _comparison(row.comparison, name, names)
    for at, (side, measured) in enumerate(zip(_words.names_of(found), (row.before, row.after), strict=False)):
        yield from _measured(measured, side, f"{name}-{at}", refused=row.verdict == "refused")


def _measured(measured: Measured | None, side: str, name: str, *, refused: bool) -> Iterator[str]:
    if measured is None:
        return
    if measured.failure is not None:
        headline = f"In {side}: {_words.line(measured.failure.headline)}"
        # What failed stands above with all that was printed; what was refused doesn't.
        details = _words.printed(measured.failure.details) if refused else ""
        yield (
            _page.folded(headline, f"<pre>{_page.escaped(details)}</pre>") if details else _page.paragraphs([headline])
        )
    own = measured.distances
    if own is not None:
        yield _page.paragraphs(
            [
                f"Distance from float64 in {side}: loss {_words.gap(own.loss)} ({_words.count_ulps(own.loss_ulps)}), "
                f"gradient norm {_words.gap(own.gradient_norm)}, weights {_words.gap(own.weights)}."
            ]
        )
    if measured.repeatable is False:
        yield _page.paragraphs([f"Not repeatable in {side}: of {measured.runs} equal runs, some differ."])
        if measured.self_comparison is not None:
            inner = "\n".join(_comparison(measured.self_comparison, f"{name}-self", ("one run", "another run")))
            yield _page.folded(f"The two runs in {side} that lie furthest apart", inner)


def _environments(found: Report) -> Iterator[str]:
    yield "<h2>Environments</h2>"
    yield _page.table(_tables.sides(found))
    for name, side in zip(_words.names_of(found), found.sides, strict=False):
        if side.notes:
            items = "".join(f"<li>{_page.escaped(_words.line(note))}</li>" for note in side.notes)
            yield f"<p>{_page.escaped(name)}:</p><ul>{items}</ul>"


def _links(found: Report) -> dict[str, str]:
    return {_words.strategy(row): f"#row{place}" for place, row in enumerate(found.rows)}


def _reasons(found: Report) -> str:
    told = [(_words.strategy(row), _words.line(row.reason)) for row in found.rows if _words.reasoned(row)]
    items = "".join(f"<li>{_page.escaped(strategy)}: {_page.escaped(reason)}</li>" for strategy, reason in told)
    return f"<ul>{items}</ul>" if items else ""


def _diagnoses(found: list[tuple[str, Diagnosis]]) -> str:
    items = []
    for name, diagnosis in found:
        who = f"{_page.escaped(name)}: " if name else ""
        sure = '<span class="dim">likely: </span>' if diagnosis.confidence == "likely" else ""
        numbers = _words.evidence(diagnosis)
        told = f'<br><span class="dim">{_page.escaped(numbers)}</span>' if numbers else ""
        items.append(f"<li>{who}{sure}{_page.escaped(_words.line(diagnosis.sentence))}{told}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _figure(plot: _plots.Plot | None) -> str:
    return "" if plot is None else f"<figure>{plot.svg}<figcaption>{_page.escaped(plot.caption)}</figcaption></figure>"


def _legend(*names: str) -> str:
    items = "".join(f"<dt>{_page.escaped(name)}</dt><dd>{_page.escaped(_words.LEGEND[name])}</dd>" for name in names)
    return f"<h2>Words</h2><dl>{items}</dl>"
