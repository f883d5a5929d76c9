"""What was found, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shardkit import __version__
from shardkit.parity._results import Comparison, Diagnosis, Measured, Report, Row
from shardkit.parity.outputs import _plots, _tables, _words

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --ground: #fff; --soft: #f3f4f6; --line: #d5d9df; --dim: #667080;
  --good: #1a7f4b; --warn: #96690a; --bad: #c22f2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe3e8; --ground: #16191d; --soft: #21262c; --line: #3a414a;
  --dim: #97a1ad; --good: #4cc38a; --warn: #dcae4a; --bad: #f0716f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; } p { margin: .4rem 0; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); } .dim { color: var(--dim); }
.verdict { padding: .7rem 1rem; border-left: .35rem solid var(--dim); background: var(--soft); font-size: 1.05rem;
  font-weight: 600; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.verdict.warn { border-color: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .4rem 0; width: 100%; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  white-space: pre-line; }
th { white-space: pre-line; vertical-align: bottom; border-bottom-width: 2px; overflow-wrap: normal; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td.plain { overflow-wrap: normal; }
tbody tr:hover { background: var(--soft); }
pre { background: var(--soft); padding: .7rem; font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: .3rem; padding: .4rem .8rem; margin: .5rem 0; }
summary { cursor: pointer; font-weight: 600; } figure { margin: .8rem 0; }
figcaption, .note, footer { color: var(--dim); font-size: .85rem; }
figure svg { width: 100%; height: auto; } dl { font-size: .9rem; } dt { font-weight: 600; float: left; clear: left;
  margin-right: .5rem; } dt::after { content: ":"; } dd { margin: 0 0 .2rem; } a { color: inherit; }
@media print { :root { --ink: #000; --ground: #fff; --soft: #f3f4f6; --line: #bbb; --dim: #444; --good: #0b6b3a;
  --warn: #7a5200; --bad: #a31515; color-scheme: light; } body { max-width: none; padding: 0; font-size: 11px; }
  figure, tr, .verdict { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .scroll { overflow: visible; } }
"""


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
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{kind}: {_text(title)}</h1></header>
<main>
{body}
</main>
<footer><p>Written by shardkit {_text(__version__)}.</p></footer>
</body>
</html>
"""


def _comparison_page(found: Comparison) -> Iterator[str]:
    yield _verdict(_words.verdict(found), _tables.TONES.get(found.verdict, ""))
    yield f"<p>a: <code>{_text(found.a)}</code><br>b: <code>{_text(found.b)}</code></p>"
    yield from _comparison(found, "comparison", ("a", "b"), "h2")
    yield _legend("gap", "round-off", "ULP")


def _comparison(found: Comparison, name: str, names: tuple[str, str], heading: str = "h3") -> Iterator[str]:
    """Yield where two runs part and why: sentences, pictures and tables."""
    yield _paragraphs([*_words.partings(found, names), _words.ends(found)])
    if found.diagnoses:
        yield f"<{heading}>What the numbers say</{heading}>"
        yield _diagnoses([("", diagnosis) for diagnosis in found.diagnoses])
    yield _figure(_plots.curves(f"{name}-curves", found, names))
    picture = _plots.heat(f"{name}-heat", found)
    yield _figure(picture)
    if picture is None and found.gaps is not None:
        yield "<p>The weights are the same in every step.</p>"
    if found.verdict != "identical":
        yield _table(_tables.growth(found, names))
    if found.differences:
        table = _tables.differences(found, names)
        yield _folded(f"{table.title} ({len(table.rows)})", _table(table), opened=len(table.rows) <= 12)


def _suite_page(found: Report) -> Iterator[str]:
    yield from _top(found)
    yield _table(_tables.suite(found), _links(found))
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
    yield _table(_tables.upgrade(found), _links(found))
    table = _tables.changed(found)
    if table.rows:
        yield _folded(f"{table.title} ({len(table.rows)})", _table(table), opened=len(table.rows) <= 20)
    else:
        yield "<p>No setting that could be read changed its value.</p>"
    yield from _found(found)
    yield _figure(_plots.losses("losses", found))
    yield from _performance(found)
    yield from _rows(found)
    yield from _environments(found)
    yield _legend("gap", "ULP", "round-off", "repeatable", "control", "speed", "distance", "baseline")


def _top(found: Report) -> Iterator[str]:
    yield _verdict(_words.line(found.summary), {0: "good", 1: "bad"}.get(found.exit_code, "warn"))
    if found.settings:
        yield f'<p class="dim">{_text(_words.settings(found))}</p>'


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
            _folded(str(failed), f"<pre>{_text(_words.printed(details))}</pre>")
            if details
            else f'<p class="bad">{_text(str(failed))}</p>'
        )


def _performance(found: Report) -> Iterator[str]:
    yield _figure(_plots.bars("bars", found))
    table = _tables.performance(found)
    yield _folded(table.title, _table(table))


def _rows(found: Report) -> Iterator[str]:
    """Yield a part for each strategy that there is more to tell of."""
    yield "<h2>Strategy by strategy</h2>"
    for place, row in enumerate(found.rows):
        body = "\n".join(part for part in _row(row, f"row{place}", found) if part)
        tone = _tables.TONES.get(row.verdict, "")
        head = f'{_text(_words.strategy(row))}: <span class="{tone}">{_text(row.verdict)}</span>'
        apart = row.verdict in ("different", "no parity")
        yield _folded("", body, opened=apart, name=f"row{place}", head=head)


def _row(row: Row, name: str, found: Report) -> Iterator[str]:
    yield _paragraphs([_words.line(row.reason)])
    if row.comparison is not None:
        names = ("before", "after") if row.after is not None else ("a", "b")
        if row.after is None:
            told = f"a: {_words.line(row.comparison.a)}", f"b: {_words.line(row.comparison.b)}"
            yield _paragraphs(list(told))
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
        yield _folded(headline, f"<pre>{_text(details)}</pre>") if details else _paragraphs([headline])
    own = measured.distances
    if own is not None:
        yield _paragraphs(
            [
                f"Distance from float64 in {side}: loss {_words.gap(own.loss)} ({_words.count_ulps(own.loss_ulps)}), "
                f"gradient norm {_words.gap(own.gradient_norm)}, weights {_words.gap(own.weights)}."
            ]
        )
    if measured.repeatable is False:
        yield _paragraphs([f"Not repeatable in {side}: of {measured.runs} equal runs, some differ."])
        if measured.self_comparison is not None:
            inner = "\n".join(_comparison(measured.self_comparison, f"{name}-self", ("one run", "another run")))
            yield _folded(f"The two runs in {side} that lie furthest apart", inner)


def _environments(found: Report) -> Iterator[str]:
    yield "<h2>Environments</h2>"
    yield _table(_tables.sides(found))
    for name, side in zip(_words.names_of(found), found.sides, strict=False):
        if side.notes:
            items = "".join(f"<li>{_text(_words.line(note))}</li>" for note in side.notes)
            yield f"<p>{_text(name)}:</p><ul>{items}</ul>"


def _links(found: Report) -> dict[str, str]:
    return {_words.strategy(row): f"#row{place}" for place, row in enumerate(found.rows)}


def _reasons(found: Report) -> str:
    told = [(_words.strategy(row), _words.line(row.reason)) for row in found.rows if _words.reasoned(row)]
    items = "".join(f"<li>{_text(strategy)}: {_text(reason)}</li>" for strategy, reason in told)
    return f"<ul>{items}</ul>" if items else ""


def _diagnoses(found: list[tuple[str, Diagnosis]]) -> str:
    items = []
    for name, diagnosis in found:
        who = f"{_text(name)}: " if name else ""
        sure = '<span class="dim">likely: </span>' if diagnosis.confidence == "likely" else ""
        numbers = _words.evidence(diagnosis)
        told = f'<br><span class="dim">{_text(numbers)}</span>' if numbers else ""
        items.append(f"<li>{who}{sure}{_text(_words.line(diagnosis.sentence))}{told}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _text(text: str) -> str:
    return escape(_words.clean(text))


def _verdict(text: str, tone: str) -> str:
    return f'<p class="verdict {tone}">{_text(text)}</p>'


def _paragraphs(texts: list[str]) -> str:
    return "".join(f"<p>{_text(text)}</p>" for text in texts if text)


def _folded(title: str, body: str, *, opened: bool = False, name: str = "", head: str = "") -> str:
    place = f' id="{name}"' if name else ""
    return f"<details{place}{' open' if opened else ''}><summary>{head or _text(title)}</summary>\n{body}\n</details>"


def _figure(plot: _plots.Plot | None) -> str:
    return "" if plot is None else f"<figure>{plot.svg}<figcaption>{_text(plot.caption)}</figcaption></figure>"


def _legend(*names: str) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(_words.LEGEND[name])}</dd>" for name in names)
    return f"<h2>Words</h2><dl>{items}</dl>"


def _table(table: _tables.Table, links: dict[str, str] | None = None) -> str:
    kinds = ["number" if column.number else "" if column.folds else "plain" for column in table.columns]
    # What is broken to be narrow on a terminal needs no breaking here.
    names = [column.name.replace("-\n", "").replace("\n", " ") for column in table.columns]
    heads = [f'<th scope="col" class="{kind}">{_text(name)}</th>' for kind, name in zip(kinds, names, strict=True)]
    rows = []
    for row in table.rows:
        cells = []
        for place, (kind, cell) in enumerate(zip(kinds, row, strict=True)):
            text = _text(cell.text)
            if links and place == 0 and cell.text in links:
                text = f'<a href="{links[cell.text]}">{text}</a>'
            cells.append(f'<td class="{f"{kind} {cell.tone}".strip()}">{text}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><caption>{_text(table.title)}</caption><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )
