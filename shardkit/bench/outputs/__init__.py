"""What a benchmark found, for people and for machines: the terminal, JSON, CSV, HTML and PNG; files by ``write``."""

from shardkit.bench.outputs.csv_ import as_csv as as_csv
from shardkit.bench.outputs.html import as_html as as_html
from shardkit.bench.outputs.json_ import as_json as as_json
from shardkit.bench.outputs.terminal import show as show

__all__ = ["as_csv", "as_html", "as_json", "show"]
