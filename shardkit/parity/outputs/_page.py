"""A page of HTML that needs nothing else: its style, and the pieces that it is made of."""

from __future__ import annotations

from html import escape

from shardkit import __version__
from shardkit.parity.outputs import _tables, _words

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


def page(heading: str, title: str, body: str) -> str:
    """Return the whole page; ``body`` is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{escaped(heading)}</h1></header>
<main>
{body}
</main>
<footer><p>Written by shardkit {escaped(__version__)}.</p></footer>
</body>
</html>
"""


def escaped(text: str) -> str:
    """Return text as HTML."""
    return escape(_words.clean(text))


def verdict(text: str, tone: str) -> str:
    """Return the one line that says what was found."""
    return f'<p class="verdict {tone}">{escaped(text)}</p>'


def paragraphs(texts: list[str]) -> str:
    """Return a paragraph for each text that isn't empty."""
    return "".join(f"<p>{escaped(text)}</p>" for text in texts if text)


def folded(title: str, body: str, *, opened: bool = False, name: str = "", head: str = "") -> str:
    """Return a part that opens at a click; ``body`` and ``head`` are HTML, ``name`` is what links point to."""
    place = f' id="{name}"' if name else ""
    return f"<details{place}{' open' if opened else ''}><summary>{head or escaped(title)}</summary>\n{body}\n</details>"


def table(found: _tables.Table, links: dict[str, str] | None = None) -> str:
    """Return a table; ``links`` are the addresses behind texts of its first column."""
    kinds = ["number" if column.number else "" if column.folds else "plain" for column in found.columns]
    # What is broken to be narrow on a terminal needs no breaking here.
    names = [column.name.replace("-\n", "").replace("\n", " ") for column in found.columns]
    heads = [f'<th scope="col" class="{kind}">{escaped(name)}</th>' for kind, name in zip(kinds, names, strict=True)]
    rows = []
    for row in found.rows:
        cells = []
        for place, (kind, cell) in enumerate(zip(kinds, row, strict=True)):
            text = escaped(cell.text)
            if links and place == 0 and cell.text in links:
                text = f'<a href="{links[cell.text]}">{text}</a>'
            cells.append(f'<td class="{f"{kind} {cell.tone}".strip()}">{text}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f'<p class="note">{escaped(found.note)}</p>' if found.note else ""
    return (
        f'<div class="scroll"><table><caption>{escaped(found.title)}</caption><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )
