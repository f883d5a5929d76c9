"""What is told of a benchmark: on the terminal, as CSV, JSON, HTML and PNG, from results that were made up."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkit.bench import Bench, Spread, outputs
from shardkit.bench.bench_cli import bench as command
from shardkit.bench.outputs import _bars, _words, write
from tests.bench.made import OUT, ROWS, bench, measured


def shown(found: Bench, width: int = 120) -> str:
    text = io.StringIO()
    outputs.show(found, Console(file=text, width=width))
    return text.getvalue()


def cells(found: Bench, row: int) -> dict[str, str]:
    table = _words.table(found)
    names = [column.name.replace("\n", " ") for column in table.columns]
    return dict(zip(names, (cell.text for cell in table.rows[row]), strict=True))


def test_a_cell_has_the_median_its_quartiles_and_what_it_is_over_the_baseline() -> None:
    assert cells(bench(), 2) == {
        "strategy": "b:stage=2,offload=cpu",
        "": "fp32",
        "largest batch": "24\n1.50 x",
        "peak MiB per rank": "100\n1.00 x",
        "samples/s": "51.0\n45.9-56.1",
        "speed over baseline": "1.02 x\n1.01-1.03",
        "tokens/s": "13,056",
        "train s for 1,000": "19.6",
        "evaluate s for 200": "50.0",
    }
    assert cells(bench(), 0)["speed over baseline"] == "baseline"
    assert cells(bench(), 0)["largest batch"] == "16"


def test_a_row_without_numbers_says_why() -> None:
    assert cells(bench(), 3)["largest batch"] == "out of\nmemory at\nbatch 1"
    assert cells(bench(), 3)["samples/s"] == "-"
    text = shown(bench())
    for row in ROWS[3:]:
        assert f"{row.name}: {row.status}: {row.note}" in text
    assert "a in bf16: not evaluated: RuntimeError: no beams" in text
    assert cells(bench(), 1)["evaluate s for 200"] == "failed"


def test_columns_that_say_nothing_are_left_out() -> None:
    rows = (measured("a", "fp32", 4, 50.0, 1.0, tokens_per_second=None, evaluation_seconds=None),)
    names = [column.name for column in _words.table(bench(rows=rows, batch=4, memory=None)).columns]
    assert names == [
        "strategy",
        "",
        "batch",
        "peak MiB\nper rank",
        "samples/s",
        "speed over\nbaseline",
        "train s\nfor 1,000",
    ]


def test_what_lies_within_the_noise_is_told_no_difference() -> None:
    found = bench()
    assert found.noise_factor == pytest.approx(1.04)
    assert [found.within_noise(row) for row in ROWS[:4]] == [True, False, True, False]
    assert "A speed from 0.96 to 1.04 times the baseline's is no difference here." in shown(found)
    tones = [row[5].tone for row in _words.table(found).rows[:3]]
    assert tones == ["dim", "good", "dim"]
    slow = bench(rows=(ROWS[0], measured("s", "fp32", 16, 10.0, 0.2)))
    assert _words.table(slow).rows[1][5].tone == "warn"
    # It may be slower than itself, too.
    assert bench(noise=(0.5,)).noise_factor == 2.0
    assert bench(noise=()).noise_factor is None
    assert "no difference" not in shown(bench(noise=()))


def test_the_table_fits_120_columns_and_breaks_no_short_name() -> None:
    table, _, _ = shown(bench(), width=120).partition("The baseline runs")
    assert max(map(len, table.splitlines())) <= 120
    assert "b:stage=2,offload=cpu " in table


def test_quartiles_of_a_few_values_are_as_by_hand() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.25, 1.75, 2)


def test_csv_has_a_line_for_each_row() -> None:
    lines = list(csv.DictReader(io.StringIO(outputs.as_csv(bench()))))
    assert [line["strategy"] for line in lines] == [row.strategy for row in ROWS]
    second = lines[1]
    assert (second["precision"], second["batch"], second["peak_memory"]) == ("bf16", "20", str(100 * 2**20))
    assert float(second["samples_per_second"]) == 100.0
    assert float(second["samples_per_second_low"]) == 90.0
    assert float(second["speed_ratio_high"]) == 2.01
    assert second["note"] == "RuntimeError: no beams"
    assert lines[3]["samples_per_second"] == ""
    assert (lines[3]["status"], lines[3]["note"]) == ("out of memory", OUT.note)


def test_json_has_everything_under_the_names_of_the_fields() -> None:
    told = json.loads(outputs.as_json(bench()))
    assert (told["format"], told["kind"], told["exit_code"]) == (1, "bench", 1)
    assert told["settings"]["workload"] == "t5-large:target=64"
    assert told["rows"][2]["samples_per_second"] == {
        "median": 51.0,
        "low": 45.9,
        "high": pytest.approx(56.1),
        "count": 6,
    }
    assert told["rows"][6]["details"] == ROWS[6].details
    assert (told["noise"], told["command"]) == ([1.04, 0.99, 1.0], "shardkit bench x")


def test_only_what_failed_is_a_failure() -> None:
    assert bench().exit_code == 1
    assert bench(rows=ROWS[:6]).exit_code == 0


class Page(HTMLParser):
    """The tags of a page, which have to be closed in their order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rects: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            self.rects.append(dict(attributes))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing() -> None:
    html = outputs.as_html(bench())
    page = Page(html)
    assert not re.search(r"https?:|src=|url\(|<script|<link|@import", html)
    for row in ROWS:
        assert row.strategy in page.text
    assert ROWS[6].details in page.text
    assert "shardkit bench x" in page.text
    assert "is no difference here" in page.text
    assert "computed from the median step, not run" in page.text


def test_bars_are_as_long_as_their_values() -> None:
    speeds = _bars.panels(bench())[1]
    rects = Page(_bars.as_svg(speeds)).rects
    widths = [float(str(rect["width"])) for rect in rects]
    assert len(widths) == 3
    assert widths[1] / widths[0] == pytest.approx(2.0, rel=0.01)
    assert widths[2] / widths[0] == pytest.approx(1.02, rel=0.01)


def test_where_the_batch_was_asked_for_it_is_not_drawn() -> None:
    assert _bars.panels(bench())[0].title == "largest batch of a rank"
    assert [panel.title for panel in _bars.panels(bench(batch=4))] == ["samples/s", "peak memory of a rank, MiB"]


def test_long_names_are_broken_at_their_commas() -> None:
    assert _bars.lines("b:stage=3,offload_optimizer=cpu,offload_parameters=cpu", 34) == [
        "b:stage=3,offload_optimizer=cpu,",
        "offload_parameters=cpu",
    ]
    assert _bars.lines("x" * 50, 34) == ["x" * 50]


def test_files_are_written_with_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write.write(bench(), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["bench.json", "bench.csv", "bench.html", "bench.png"]
    picture = paths[3].read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[place : place + 4], "big") for place in (16, 20))
    assert width > height > 300


def test_without_matplotlib_all_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def absent(name: str, *more: Any) -> Any:
        return None if name == "matplotlib" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert [path.name for path in write.write(bench(), tmp_path)] == ["bench.json", "bench.csv", "bench.html"]
    assert "pip install 'shardkit[tools]'" in write.NO_PLOT


def test_the_page_of_the_docs_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    for parameter in command.params:
        for option in parameter.opts if parameter.name != "workload" else []:
            assert f"`{option}`" in page, option


def test_results_without_any_numbers_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write.write(bench(rows=ROWS[3:]), tmp_path)
    assert "out of memory" in shown(bench(rows=ROWS[3:]))
