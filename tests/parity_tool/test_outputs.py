"""What was found is told whole and readable, whatever it is, on the terminal, in JSON, in JUnit XML and in HTML."""

from __future__ import annotations

import functools
import io
import json
import math
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from shardkit.errors import MissingLibraryError
from shardkit.parity._results import Comparison, Diagnosis, Difference, Distances, Parting, Report, Row, Side
from shardkit.parity.outputs import _plots, _tables, _words, as_html, as_json, as_junit, show
from tests.parity_tool import _made

MADE: dict[str, Callable[[], Comparison | Report]] = {
    "suite": _made.suite,
    "upgrade": _made.upgrade,
    "uninstalled": _made.uninstalled,
    "rich": _made.rich_comparison,
    "no steps": lambda: _made.comparison(steps=0),
    "one step": lambda: _made.comparison(steps=1, parameters=1),
    "two steps": lambda: _made.comparison("round-off", steps=2, parameters=500),
    "identical": lambda: _made.comparison("identical"),
    "incomparable": lambda: _made.comparison(
        "incomparable", differences=[Difference("model", "parameters", 3, 4)], loss_b=[], final_weights=None
    ),
    "of nothing": lambda: Report("run", {}, [], [], 2, ""),
    "of no numbers": lambda: _made.comparison(
        "different",
        steps=3,
        loss_a=[math.nan] * 3,
        loss_b=[math.inf, -math.inf, 1e300],
        first_bit=Parting(1, "loss", "", math.nan, math.inf, math.nan, math.nan),
        parting=None,
        final_weights=math.nan,
        final_ulps=math.nan,
    ),
}


PAGES = list(MADE)


@pytest.fixture(params=PAGES)
def found(request: pytest.FixtureRequest) -> Comparison | Report:
    return MADE[request.param]()


@functools.cache
def html(name: str) -> str:
    return as_html(MADE[name]())


def printed(found: Comparison | Report, width: int = 120) -> str:
    file = io.StringIO()
    show(found, Console(file=file, width=width))
    return file.getvalue()


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Page(HTMLParser):
    """Read a page: its text, its attributes, and whether its elements are closed in order."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.attributes, self.tags = "", [], []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_json_parses_strictly_and_says_what_it_is(found: Comparison | Report) -> None:
    told = strict(as_json(found))
    assert (told["format"], told["exit_code"]) == (1, found.exit_code)
    assert told["kind"] == (found.kind if isinstance(found, Report) else "comparison")


def test_json_of_an_upgrade_holds_everything_but_the_traces() -> None:
    report = _made.upgrade()
    told = strict(as_json(report))
    assert [row["strategy"].encode("utf-8", "surrogatepass") for row in told["rows"]] == [
        row.strategy.encode("utf-8", "surrogatepass") for row in report.rows
    ]
    different = told["rows"][1]
    assert (different["control"], different["verdict"], different["speed_ratio"]) == (True, "different", 0.98)
    assert different["before"]["step_seconds"] == [16 / 200, 15.5 / 200, 16.6 / 200]
    assert different["before"]["distances"]["loss_ulps"] == 2.0
    assert different["changed"][2]["b"] is None
    assert different["comparison"]["parting"]["step"] == 5
    assert different["comparison"]["exit_code"] == 1
    assert different["comparison"]["summary"] == "different: they part in step 5, in the loss"
    assert different["comparison"]["diagnoses"][1]["evidence"]["share"] is None
    assert len(different["comparison"]["gaps"]["parameter_weights"][0]) == 30
    assert told["sides"][1]["baseline"]["failure"]["stage"] == "timeout"
    assert '"trace"' not in as_json(report)


def test_junit_parses_and_counts_its_cases(found: Comparison | Report) -> None:
    root = ElementTree.fromstring(as_junit(found).encode())
    assert root.tag == "testsuites"
    total = dict.fromkeys(("tests", "failures", "errors"), 0)
    for suite in root:
        assert (suite.tag, suite[0].tag) == ("testsuite", "properties")
        cases = suite.findall("testcase")
        amounts = {
            "tests": len(cases),
            "failures": len(suite.findall("testcase/failure")),
            "errors": len(suite.findall("testcase/error")),
            "skipped": len(suite.findall("testcase/skipped")),
        }
        assert {name: int(suite.get(name, "-1")) for name in amounts} == amounts
        assert float(suite.get("time", "-1")) >= 0
        for name in total:
            total[name] += amounts[name]
        for case in cases:
            assert case.get("classname")
            assert case.get("name")
            assert float(case.get("time", "-1")) >= 0
            outcomes = [child.tag for child in case if child.tag != "system-out"]
            assert len(outcomes) <= 1
            assert all(child.get("message") for child in case if child.tag != "system-out")
        assert all(item.get("name") and item.get("value") is not None for item in suite[0])
    assert {name: int(root.get(name, "-1")) for name in total} == total


def test_junit_has_a_case_for_each_row_by_its_verdict() -> None:
    report = _made.upgrade()
    root = ElementTree.fromstring(as_junit(report).encode())
    names = [suite.get("name") for suite in root]
    assert names == ["environment lib 1.2.3", "environment lib 1.3.0", "shardkit parity upgrade"]
    cases = root[2].findall("testcase")
    outcomes = {"same": "", "round-off": "", "different": "failure", "could not run": "error", "refused": "skipped"}
    for row, case in zip(report.rows, cases, strict=True):
        assert next((child.tag for child in case if child.tag != "system-out"), "") == outcomes[row.verdict]
    assert cases[1].get("name") == "one:stage=1 (control)"
    failure = cases[1].find("failure")
    assert failure is not None
    assert failure.get("message") == "the losses part in step 5"
    assert "The first bit that differs is seen in step 3" in (failure.text or "")
    assert "ZeroConfig.overlap_comm was false, is true" in (failure.text or "")
    crash = next(case for case in cases if case.get("name") == "fails:crash").find("error")
    assert crash is not None
    assert crash.get("type") == "crash"
    assert "Traceback" in (crash.text or "")
    # 30 steps, of three runs on each of the two sides.
    assert float(cases[0].get("time", "0")) == pytest.approx(30 * (48.1 / 200 + 48.1 / 196), abs=1e-3)
    properties = {item.get("name"): item.get("value") for item in root[1][0]}
    assert properties == {
        "wanted.lib": "1.3.0",
        "version.lib": "1.3.0",
        "version.torch": "2.13.0",
        "version.new": "0.1",
    }


def test_junit_of_a_suite_has_an_outcome_for_each_verdict() -> None:
    report = _made.suite()
    cases = ElementTree.fromstring(as_junit(report).encode())[1].findall("testcase")
    outcomes = {
        "parity": "",
        "no parity": "failure",
        "could not run": "error",
        "refused": "error",
        "unjudged": "skipped",
    }
    for row, case in zip(report.rows, cases, strict=True):
        assert next((child.tag for child in case if child.tag != "system-out"), "") == outcomes[row.verdict]


def test_junit_of_an_environment_that_could_not_be_made_is_an_error() -> None:
    root = ElementTree.fromstring(as_junit(_made.uninstalled()).encode())
    error = root[1].find("testcase/error")
    assert error is not None
    assert (error.get("type"), error.get("message")) == ("install", "there is no lib 9.9")


@pytest.mark.parametrize("point", [*range(0x20), 0x7F, 0x85, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x1F600])
def test_any_character_that_a_process_printed_stands_in_xml_and_html(point: int) -> None:
    text = f"before{chr(point)}after"
    failed = _made.failed("crash", text, text)
    report = Report("run", {text: text}, [], [Row(text, False, "could not run", text, failed)], 2, text)
    root = ElementTree.fromstring(as_junit(report).encode())
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert re.fullmatch(r"before.*after", error.get("message") or "")
    assert "before" in Page(as_html(report)).text
    as_html(report).encode()
    printed(report).encode()


@pytest.mark.parametrize("name", PAGES)
def test_html_is_well_formed_and_loads_nothing(name: str) -> None:
    text = html(name)
    text.encode()
    page = Page(text)
    assert not page.open
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    for _, name, value in page.attributes:
        assert "//" not in value or value.startswith("data:image/png;base64,"), (name, value)
        assert not name.startswith("on")
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    names = [value for _, name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    used = {value[1:] for tag, name, value in page.attributes if name in ("href", "xlink:href") and value[:1] == "#"}
    used |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(names)


def test_the_same_finding_is_the_same_page() -> None:
    assert as_html(_made.rich_comparison()) == html("rich")


def test_a_page_leaves_the_users_settings_of_matplotlib_alone() -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 31.0, "text.usetex": True, "axes.prop_cycle": mpl.cycler(color=["red"])}):
        before = dict(mpl.rcParams)
        text = as_html(_made.comparison())
        assert dict(mpl.rcParams) == before
    assert text == as_html(_made.comparison())


@pytest.mark.parametrize("name", PAGES)
def test_each_plot_is_xml_of_its_own(name: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", html(name), re.DOTALL):
        ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="xlink" ', 1))
        assert "currentColor" in svg
        assert "#010203" not in svg


@pytest.mark.parametrize("name", ["suite", "upgrade"])
def test_html_names_every_strategy_failure_and_control(name: str) -> None:
    report = MADE[name]()
    assert isinstance(report, Report)
    text = Page(html(name)).text
    for row in report.rows:
        assert _words.strategy(row) in text
    assert "one:stage=" in text
    assert "(control)" in text
    for stage in _made.STAGES:
        assert re.search(f"fails:{stage}.* {_words.STAGES[stage]}: rank 1 raised RuntimeError", text)
    assert "Traceback (most recent call last)" in text
    assert report.summary in text
    for word in ("distance", "ULP", "round-off", "repeatable", "control"):
        assert _words.LEGEND[word] in text


def test_html_of_a_comparison_shows_losses_gaps_and_parameters() -> None:
    page = Page(as_html(_made.rich_comparison(parameters=60)))
    assert page.tags.count("svg") == 2
    assert "image" in page.tags
    for words in ("exactly 0", "first bit", "they part", "the 40 most different of 60 parameters", "in a", "in b"):
        assert words in page.text
    assert "ZeroConfig.reduce_bucket_size" in page.text
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in page.text


def test_a_long_comparison_is_thinned_out_and_written_within_seconds() -> None:
    found = _made.long()
    begin = time.monotonic()
    text = as_html(found)
    assert time.monotonic() - begin < 30
    assert len(text) < 1_000_000
    told = Page(text).text
    assert "(20 values not finite)" in told
    assert "the 40 most different of 500 parameters" in told
    assert "A column is the largest of about 50 steps" in told
    assert "not finite" in printed(found) or "nan" in printed(found)


def test_thinning_keeps_the_extremes_and_what_is_not_finite() -> None:
    values = [0.0] * 10_000
    values[1234], values[5678], values[9012] = 5.0, -7.0, math.nan
    places = _plots.thinned(values)
    assert len(places) <= 600
    assert {1234, 5678, 9012} <= set(places)
    assert _plots.thinned([1.0, 2.0]) == [0, 1]


def test_a_cell_of_the_heat_map_is_the_largest_of_its_steps() -> None:
    scale = _plots._Scale.of([1e-6, 1e-2])
    row = [0.0] * 400
    row[101], row[203] = 1e-3, math.nan
    cells = _plots._columns(row, 400, scale)
    assert len(cells) == 200
    assert cells[50] == 1e-3
    assert cells[101] > scale.high
    assert cells[0] < scale.low


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibraryError, match=re.escape("pip install 'shardkit[tools]'")):
        as_html(_made.comparison())


def test_the_terminal_prints_anything_within_its_width(found: Comparison | Report) -> None:
    text = printed(found)
    text.encode()
    assert "\x1b" not in text
    assert "\x08" not in text
    table = [line for line in text.splitlines() if line.startswith("  ")]
    assert all(len(line) <= 120 for line in table if not line.startswith("    "))


def test_the_terminal_says_where_two_runs_part_and_why() -> None:
    text = printed(_made.rich_comparison())
    assert "different: they part in step 5, in the loss" in text
    assert (
        "All is the same up to step 2. The first bit that differs is seen in step 3: the gradient of "
        "encoder.block.0.q.weight on rank 1, of L2 norm 0.25 in a and 0.2500001 in b, a relative 4e-07 apart." in text
    )
    assert "Beyond round-off they part in step 5: the loss, 2.75 in a and 2.81 in b, 2.18 % apart, 251658 ULPs." in text
    assert "At the end the weights are 0.34 % apart; no single one by more than 41000 ULPs of its tensor." in text
    assert "the gradients of run B are 2 times those of run A in every step" in text
    assert "ratio 2, expected 2, steps 30" in text
    assert "likely: decay acts" in text
    assert re.search(r"configuration +ZeroConfig.reduce_bucket_size +500000000 +50000000", text)
    assert re.search(r"Config.gradient_clipping +\(absent\) +1.0", text)
    # What makes two runs incomparable stands first.
    assert text.index("step 4") < text.index("ZeroConfig") < text.index("2.14.0")
    assert re.search(r"^ +30 +0.712264811 +1.00226481 +2.0e-02 +2.0e-02 +2.0e-02 +5.0e-03 *$", text, re.MULTILINE)


def test_the_terminal_says_that_two_runs_are_the_same() -> None:
    text = printed(_made.comparison("identical"))
    assert "identical: every recorded bit is the same, over 30 steps\nNo bit differs." in text
    assert "How the gap grows" not in text


def test_the_terminal_shows_a_suite_row_beside_the_baselines_distances() -> None:
    text = printed(_made.suite())
    assert re.search(r"plain data parallel of +baseline +yes +1.0e-07 +3.0e-07 +4.0e-06 +1 +240.0 +5.0", text)
    assert re.search(r"one:stage=1,accumulate=2 +parity +yes +1.2e-07 +3.4e-07 +5.6e-06 +2 +210.0 +5.0", text)
    assert re.search(r"^ +x1.20 +x1.13 +x1.40 *$", text, re.MULTILINE)
    assert re.search(r"one:stage=3 \(control\) +parity +NO", text)
    assert "fails:crash died: rank 1 raised RuntimeError: no such op" in text
    assert "nothing: it trains on no CPU" in text
    assert "one:stage=3 (control): not repeatable" in text
    # Of what is at parity the numbers say it all.
    assert "nothing more to say" not in text
    assert "control: the library driven by itself" in text
    assert text.rstrip().endswith("7 of 13 strategies could not run, and 1 has no parity")


def test_the_terminal_shows_an_upgrade() -> None:
    text = printed(_made.upgrade())
    assert text.startswith("t5-tiny on lib 1.2.3 against lib 1.3.0\n")
    assert re.search(r"lib +1.2.3 +1.3.0 *\n +new +- +0.1 *\n +torch +2.13.0 +2.13.0", text)
    assert re.search(r"one:stage=1 \(control\) +different +the losses part in step 5 +0.712264811 +x0.98 +x1.00", text)
    assert re.search(r"^ +1.00226481 +± 5 % *$", text, re.MULTILINE)
    assert "the gradient of encoder.block.0.q.weight on rank 1, of L2 norm 0.25 before and 0.2500001 after" in text
    assert re.search(r"ZeroConfig.overlap_comm +false +true", text)
    assert "races: the run differs from itself" in text
    assert "the baseline (lib 1.3.0) did not end in time: no answer in 60 s" in text
    assert "fails:install (lib 1.3.0) did not install: rank 1 raised RuntimeError" in text
    # Refused in the same words on both sides is no failure.
    assert "refuses (lib" not in text
    assert text.rstrip().endswith("different: 4 of 15 strategies differ, and 7 could not run")


def test_markup_in_names_and_numbers_is_text() -> None:
    report = Report(
        "run", {}, [], [Row("[bold]x[/bold]", False, "no parity", "[red]y[/]", _made.measured())], 0, "[u]z"
    )
    text = printed(report)
    for literal in ("[bold]x[/bold]", "[red]y[/]", "[u]z"):
        assert literal in text


@pytest.mark.parametrize(
    ("length", "first", "parting", "steps"),
    [
        (0, None, None, []),
        (1, 1, 1, [1]),
        (30, None, None, [1, 2, 3, 5, 9, 17, 30]),
        (30, 3, 5, [1, 3, 5, 6, 7, 9, 13, 21, 30]),
        (30, 30, 30, [1, 30]),
        (100, 2, None, [1, 2, 3, 4, 6, 10, 18, 34, 66, 100]),
    ],
)
def test_steps_grow_by_powers_of_two_from_where_the_runs_part(
    length: int, first: int | None, parting: int | None, steps: list[int]
) -> None:
    found = _made.comparison(
        steps=length,
        first_bit=None if first is None else Parting(first, "loss"),
        parting=None if parting is None else Parting(parting, "loss"),
    )
    assert _tables.steps(found) == steps


@pytest.mark.parametrize(
    ("parting", "sentence"),
    [
        (
            Parting(1, "weights before the first step", "w", 2.0, 2.5, 0.25),
            "The first bit that differs is seen before the first step: the weights of w, of L2 norm 2 in a and 2.5 in "
            "b, 25 % apart.",
        ),
        (
            Parting(4, "applied", "", 1.0, 0.0, 1.0),
            "All is the same up to step 3. The first bit that differs is seen in step 4: whether the step moved the "
            "weights, yes in a and no in b.",
        ),
        (
            Parting(2, "loss", "", 1.5, math.nan, math.nan, math.nan),
            "All is the same up to step 1. The first bit that differs is seen in step 2: the loss, 1.5 in a and nan "
            "in b.",
        ),
        (
            Parting(1, "gradient", "w", 1.0, 2.0, 0.5, count=7),
            "The first bit that differs is seen in step 1: the gradient of w, of L2 norm 1 in a and 2 in b, 50 % "
            "apart, the most of 7 parameters.",
        ),
        (Parting(1, "data", rank=1), "The first bit that differs is seen in step 1: the batch on rank 1."),
        (
            Parting(1, "loss", "", 1.0, 1.0000001, 1.2e-7, 1.0),
            "The first bit that differs is seen in step 1: the loss, 1 in a and 1.0000001 in b, a relative 1.2e-07 "
            "apart, 1 ULP.",
        ),
    ],
)
def test_a_parting_is_a_sentence(parting: Parting, sentence: str) -> None:
    assert _words.partings(_made.comparison(first_bit=parting, parting=parting))[0] == sentence


def test_ratios_to_the_baseline_that_is_exact_are_told_apart() -> None:
    assert _words.ratio(0.0, 0.0) == 1.0
    assert _words.ratio(1e-9, 0.0) == math.inf
    assert _words.ratio(3e-7, 1e-7) == pytest.approx(3.0)
    assert _words.ratio(None, 1e-7) is None
    assert _words.times(math.nan) == "-"


def test_a_run_that_was_done_once_is_not_called_repeatable() -> None:
    assert _words.repeatable(_made.measured(runs=1)) == "-"
    assert _words.repeatable(_made.measured(runs=2)) == "yes"
    assert _words.repeatable(_made.measured(runs=2, repeatable=False)) == "NO"


def test_much_that_was_printed_is_shortened_in_its_middle() -> None:
    text = _words.printed("a" * 150_000 + "b" * 150_000)
    assert (text[0], text[-1]) == ("a", "b")
    assert "[... 100000 characters left out ...]" in text
    assert _words.printed("\x1b[1;31mred\x1b[0m\r\n50 %\r100 %") == "red\n50 %\n100 %"


def test_a_default_that_changed_for_several_strategies_is_one_row() -> None:
    rows = [[cell.text for cell in row] for row in _tables.changed(_made.upgrade()).rows]
    assert rows[0] == [
        "ZeroConfig.overlap_comm",
        "false",
        "true",
        "one:stage=1 (control), one:stage=2,accumulate=2, one:stage=3,offload=parameters,accumulate=4",
    ]
    assert rows[1][:3] == ["ZeroConfig.reduce_bucket_size", "500000000", "(absent)"]


def test_a_difference_that_only_counts_more_of_its_kind_has_no_values() -> None:
    assert _words.sides_of(Difference("start", "and 8 more weights")) == ("", "")
    assert _words.sides_of(Difference("seed", "torch", None, 1)) == ("null", "1")
    assert _words.sides_of(Difference("seed", "torch", None, None, "a")) == ("(absent)", "null")


def test_a_diagnosis_of_the_repeats_is_told_once() -> None:
    race = Diagnosis("race", "the run differs from itself", {})
    twice = _made.comparison(diagnoses=[race, race])
    row = Row("x", False, "different", "", _made.measured(self_comparison=twice), _made.measured(), twice)
    assert list(_words.diagnoses(Report("upgrade", {}, [], [row], 1, ""))) == [("x", race)]


def test_names_are_no_formulas_in_plots() -> None:
    gaps = _made.gaps(3, 2, 1)
    gaps.names[:] = [_made.HOSTILE, "a$x$b"]
    plot = _plots.heat("h", _made.comparison(steps=3, gaps=gaps))
    assert plot is not None
    for literal in (">a$x$b<", "&lt;script&gt;alert(", "日本"):
        assert literal in plot.svg
    rows = [Row("$\\frac{$ <b>", False, "parity", "", _made.measured())]
    report = Report("run", {}, [], rows, 0, "")
    for drawn in (_plots.losses("l", report), _plots.distances("d", report), _plots.bars("b", report)):
        assert drawn is not None
        assert "$\\frac{$ &lt;b&gt;" in drawn.svg


def test_exact_zeros_lie_below_all_else_on_a_log_axis_and_what_is_not_finite_above() -> None:
    scale = _plots._Scale.of([0.0, 3e-8, 2e-2, math.nan])
    places = [scale.place(value) for value in (0.0, 3e-8, 2e-2, math.nan)]
    assert places[1:3] == [3e-8, 2e-2]
    assert 0 < places[0] < scale.low <= 1e-8
    assert places[3] > scale.high >= 1e-1
    assert scale.place(math.inf) == places[3]
    # Nothing but zeros has an axis, too.
    assert _plots._Scale.of([0.0]).place(0.0) > 0


def test_an_environment_against_itself_has_two_names() -> None:
    side = Side("lib 1.2.3", {"lib": "1.2.3"}, {"lib": "1.2.3"}, ["note"], None, _made.measured())
    row = Row("x", False, "same", "", _made.measured(200.0), _made.measured(100.0))
    report = Report("upgrade", {}, [side, side], [row], 0, "same")
    assert [side for _, side, _ in _tables.all_measured(report)] == 2 * ["lib 1.2.3 (before)", "lib 1.2.3 (after)"]
    assert "100.0" in Page(as_html(report)).text
    assert "lib 1.2.3 (after): note" in printed(report)
    assert 'name="environment lib 1.2.3 (after)"' in as_junit(report)


def test_distances_that_are_not_finite_are_drawn() -> None:
    report = _made.suite()
    row = Row("x", False, "unjudged", "", _made.measured(distances=Distances(math.nan, math.inf, 0.0, math.nan)))
    plot = _plots.distances("d", Report("run", {"factor": 4.0}, report.sides, [row], 2, ""))
    assert plot is not None
    assert ">inf<" in plot.svg
    assert ">0<" in plot.svg
