"""The pytest plugin, in test files of a user."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit import testing
from shardkit.parity import Trace, pytest_plugin
from shardkit.parity.pytest_plugin import Parity
from tests.parity_tool import _made

_LOOP = """
import pytest, torch, shardkit

def train(strategy, record, lr=0.1, width=8, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with shardkit.prepare(model, optimizer, strategy) as session, record(session):
        for step in range(3):
            torch.manual_seed(10 * step + session.rank)
            batch = torch.randn(6, 4)
            session.backward((session.model(batch).squeeze(1) - batch.sum(1)).to(dtype).square().mean())
            session.step()
"""

_HELD = (
    _LOOP
    + """
@pytest.mark.parity("ddp", "deepspeed:stage=2", against="traces/loop.trace")
def test_my_loop(parity):
    parity.check(train)
"""
)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import what tests of the user's use: pytester has everything that they import forgotten after them."""
    shardkit.backends()
    names = ("parity._compare", "parity._loop", "parity.outputs.write", "_prepare")
    for name in ("torch._dynamo", *(f"shardkit.{name}" for name in names)):
        importlib.import_module(name)


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of a user's, where the plugin is loaded. Ranks are forked, not started anew, to save time."""
    monkeypatch.setattr("shardkit._launch.launch", testing.run)
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --strict-markers")
    return pytester


def ran(user: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return user.runpytest_inprocess(*arguments, plugins=[pytest_plugin])


def written(user: pytest.Pytester, code: str, *arguments: str) -> pytest.RunResult:
    user.makepyfile(code)
    return ran(user, *arguments)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The trace of the loop under one process, to be held to."""
    path = tmp_path_factory.mktemp("recorded") / "loop.trace"
    space: dict[str, object] = {}
    exec(_LOOP, space)
    testing.run(pytest_plugin._ranked, space["train"], "ddp", str(path), processes=1)
    return path.read_bytes()


def held_to(user: pytest.Pytester, trace: bytes, call: str, mark: str = "") -> pytest.RunResult:
    """Run a test of one process that holds a call's loop to the trace."""
    (user.path / "loop.trace").write_bytes(trace)
    code = f"""
@pytest.mark.parity("ddp", against="loop.trace", processes=1{mark})
def test_it(parity):
    {call}
"""
    return written(user, _LOOP + code)


def test_a_trace_is_recorded_with_the_first_strategy_and_the_others_are_held_to_it(user: pytest.Pytester) -> None:
    missing = written(user, _HELD, "-k", "ddp")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no trace *loop.trace': record it with pytest --parity-record*"])

    ran(user, "--parity-record", "-rs").assert_outcomes(passed=1, skipped=1)
    trace = Trace.load(user.path / "traces" / "loop.trace")
    assert (trace.facts["backend"], trace.ranks, trace.steps) == ("ddp", 2, 3)

    ran(user).assert_outcomes(passed=2)


def test_a_loop_that_changed_fails_with_where_and_why(user: pytest.Pytester, recorded: bytes) -> None:
    result = held_to(user, recorded, "parity.check(lambda strategy, record: train(strategy, record, lr=0.2))")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "learning rate" in text
    assert "step 1" in text
    # What the user reads is the comparison, not where the plugin raised.
    assert "pytest_plugin.py" not in text


def test_a_loop_within_the_test_is_held_too(user: pytest.Pytester, recorded: bytes) -> None:
    result = held_to(
        user, recorded, "rate = 0.1\n    assert parity.check(lambda s, r: train(s, r, lr=rate)).verdict == 'identical'"
    )
    result.assert_outcomes(passed=1)


def test_another_model_is_incomparable(user: pytest.Pytester, recorded: bytes) -> None:
    result = held_to(user, recorded, "parity.check(lambda strategy, record: train(strategy, record, width=9))")
    result.assert_outcomes(failed=1)
    assert "comparable" in result.stdout.str()


def test_an_error_of_the_loop_is_shown_as_the_rank_saw_it(user: pytest.Pytester, recorded: bytes) -> None:
    result = held_to(
        user, recorded, "def loop(strategy, record):\n        raise KeyError('planted')\n    parity.check(loop)"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ddp: LaunchError: rank 0 failed:*", "*KeyError: 'planted'*"])
    assert "pytest_plugin.py" in result.stdout.str()
    assert "collect(started" not in result.stdout.str()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("parity.check(7)", "a loop is a function of a strategy and record, not 7"),
        ("parity.check(lambda strategy: None)", "takes 1 arguments: a loop takes two"),
        ("parity.check(lambda strategy, record: None)", "didn't record: it trains within `with record"),
        ("parity.check(lambda s, record: train('deepspeed', record))", "given the strategy 'ddp' and prepared 'deep"),
    ],
)
def test_what_is_no_loop_is_refused(user: pytest.Pytester, recorded: bytes, call: str, words: str) -> None:
    result = held_to(user, recorded, call)
    result.assert_outcomes(failed=1)
    assert words in result.stdout.str()


def test_a_damaged_trace_is_refused_by_its_name(user: pytest.Pytester, recorded: bytes) -> None:
    edited = bytearray(recorded)
    edited[-1] ^= 1
    result = held_to(user, bytes(edited), "parity.check(train)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ddp: TraceError: trace *loop.trace' is damaged, or was edited*"])


def test_exact_asks_for_the_same_bits(user: pytest.Pytester, recorded: bytes) -> None:
    held_to(user, recorded, "assert parity.check(train).verdict == 'identical'", ", exact=True").assert_outcomes(
        passed=1
    )
    call = "found = parity.check(lambda s, r: train(s, r, dtype=torch.float64)); assert found.verdict == 'round-off'"
    held_to(user, recorded, call).assert_outcomes(passed=1)
    result = held_to(user, recorded, call, ", exact=True")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*exact=True asks for the same to the last bit*"])


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("parity()", "takes one strategy or more"),
        ("parity(7)", "takes one strategy or more, as strings, not (7,)"),
        ("parity('ddp', processes=0)", "processes of the mark parity is a number of ranks, at least 1, not 0"),
        ("parity('ddp', processes='2')", "a number of ranks, at least 1, not '2'"),
        ("parity('ddp', timeout=True)", "timeout of the mark parity is a number of seconds above 0, not True"),
        ("parity('ddp', exact=1)", "exact of the mark parity is True or False, not 1"),
        ("parity('ddp', against=3)", "against of the mark parity is a path, relative to the test's file, not 3"),
        ("parity('ddp', agianst='x')", "has no 'agianst'; it has against, processes, timeout, exact"),
    ],
)
def test_a_wrong_mark_is_told_when_tests_are_collected(user: pytest.Pytester, mark: str, words: str) -> None:
    result = written(user, f"import pytest\n@pytest.mark.{mark}\ndef test_it(parity): pass")
    result.assert_outcomes(errors=1)
    assert words in result.stdout.str()
    assert "site-packages" not in result.stdout.str()


def test_a_fixture_without_its_mark_and_a_mark_without_its_fixture_are_told(user: pytest.Pytester) -> None:
    result = written(user, "def test_it(parity): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*a test with the fixture 'parity' is marked with its strategies*"])
    result = written(user, "import pytest\n@pytest.mark.parity('ddp')\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the test has no argument 'parity'*"])


def test_a_mark_of_a_class_is_for_the_tests_that_ask_for_the_fixture(user: pytest.Pytester) -> None:
    result = written(
        user,
        "import pytest\n"
        "@pytest.mark.parity('ddp', 'deepspeed')\n"
        "class TestLoops:\n"
        "    def test_one(self, parity): assert parity.first == 'ddp'\n"
        "    def test_other(self): pass\n",
    )
    result.assert_outcomes(passed=3)


def test_a_fixture_of_the_users_by_the_same_name_is_left_alone(user: pytest.Pytester) -> None:
    code = "import pytest\n@pytest.fixture\ndef parity(): return 7\ndef test_it(parity): assert parity == 7"
    written(user, code).assert_outcomes(passed=1)


def test_a_strategy_that_doesnt_exist_is_told_with_the_near_one(user: pytest.Pytester) -> None:
    result = written(user, _LOOP + "@pytest.mark.parity('dpp')\ndef test_it(parity): parity.check(train)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*dpp: BackendNotFoundError: *'ddp'*"])


def test_the_plugin_is_an_entry_point_and_loads_no_torch_in_no_time(tmp_path: Path) -> None:
    project = Path(shardkit.__file__).parents[1] / "pyproject.toml"
    assert '[project.entry-points.pytest11]\nshardkit = "shardkit.parity.pytest_plugin"\n' in project.read_text()
    code = (
        "import sys, time, pytest\n"
        "start = time.perf_counter()\n"
        "import shardkit.parity.pytest_plugin\n"
        "print(time.perf_counter() - start, *sys.modules)"
    )
    best = float("inf")
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        seconds, *modules = done.stdout.split()
        assert not {"torch", "numpy", "rich", "click", "cloudpickle", "shardkit.parity._compare"} & set(modules)
        best = min(best, float(seconds))
    assert best < 0.02


@pytest.mark.parametrize("way", ["entry point", "option", "conftest"])
def test_the_plugin_may_come_by_several_ways_at_once(
    user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    held = user.mkdir("installed-0.1.dist-info")
    (held / "entry_points.txt").write_text("[pytest11]\nshardkit = shardkit.parity.pytest_plugin\n")
    (held / "METADATA").write_text("Name: installed\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(user.path), *sys.path]))
    if way == "conftest":
        user.makeconftest("pytest_plugins = ['shardkit.parity.pytest_plugin']")
    options = ["-p", "shardkit.parity.pytest_plugin"] if way == "option" else []
    result = user.runpytest_subprocess("--markers", *options)
    assert result.ret == 0, result.stderr.str()
    result.stdout.fnmatch_lines(["@pytest.mark.parity(*strategies, against=None, processes=2*"])


def test_tests_are_run_where_ranks_cant_import_their_file(
    user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit._launch.launch", shardkit.launch)
    code = _LOOP + "@pytest.mark.parity('ddp', processes=1)\ndef test_it(parity): assert parity.run(train).steps == 3"
    written(user, code, "--import-mode=importlib").assert_outcomes(passed=1)


def test_a_run_that_ends_early_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [3.0, 2.0, 1.5, 1.25]
    _made.trace(losses).save(tmp_path / "whole.trace")
    monkeypatch.setattr(Parity, "run", lambda self, loop, strategy=None: _made.trace(losses[:2]))
    held = Parity("b", "a", tmp_path / "whole.trace", 1, 10.0, False, False, tmp_path, None)
    with pytest.raises(pytest.fail.Exception, match="the 2 steps that both have, of 4 in a and 2 in b"):
        held.check(lambda strategy, record: None)
