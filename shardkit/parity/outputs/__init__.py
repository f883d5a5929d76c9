"""What the parity tools found, for people and for machines: the terminal, JSON, JUnit XML and HTML.

Each takes a comparison of two traces, a suite's report or an upgrade's.
"""

from shardkit.parity.outputs.html import as_html as as_html
from shardkit.parity.outputs.json_ import as_json as as_json
from shardkit.parity.outputs.junit import as_junit as as_junit
from shardkit.parity.outputs.terminal import show as show

__all__ = ["as_html", "as_json", "as_junit", "show"]
