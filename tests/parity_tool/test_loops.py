"""A user's own loop, and bad input, from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from shardkit import Strategy
from shardkit.cli import main
from shardkit.errors import InputError, TraceError
from shardkit.parity import Trace, pytest_plugin
from shardkit.parity._loop import run_loop

_LOOPS = """
import torch, shardkit
from torch.optim.lr_scheduler import LambdaLR

def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def rows(seed, length):
    return torch.randn(length, 4, generator=torch.Generator().manual_seed(seed))

def train(strategy, record):
    with shardkit.prepare(*made(), strategy) as session, record(session):
        schedule = LambdaLR(session.optimizer, lambda step: 1 / (1 + step))
        loader = [rows(10 * session.rank + length, length) for length in (1, 2, 3)]
        for epoch in range(2):
            for window in session.windows(loader, weight=len):
                for batch in window:
                    session.backward((session.model(batch).squeeze(1) - batch.sum(1)).square().sum())
                    if session.step():
                        schedule.step()
            with session.evaluate() as module:
                module(rows(99, 4))

def other_model(strategy, record):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session, record(session):
        session.backward(session.model(rows(0, 2)).mean())
        session.step()

def silent(strategy, record):
    with shardkit.prepare(*made(), strategy):
        pass

def idle(strategy, record):
    with shardkit.prepare(*made(), strategy) as session, record(session):
        pass

def twice(strategy, record):
    with shardkit.prepare(*made(), strategy) as session:
        for _ in range(2):
            with record(session):
                session.backward(session.model(rows(0, 2)).mean())
                session.step()

def fails(strategy, record):
    with shardkit.prepare(*made(), strategy) as session, record(session):
        for step in range(3):
            session.backward(session.model(rows(step, 2)).mean())
            session.step()
        raise KeyError("planted")

def elsewhere(strategy, record):
    with shardkit.prepare(*made(), "ddp") as session, record(session):
        session.backward(session.model(rows(0, 2)).mean())
        session.step()

def three(strategy, record, rate):
    pass
"""


def parity(*arguments: object) -> Result:
    done = CliRunner().invoke(main, ["parity", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loops") / "loops.py"
    path.write_text(_LOOPS)
    return path


@pytest.fixture(scope="module")
def recorded(loops: Path) -> Path:
    """Return the trace of ``train``, whole gradients and all."""
    path = loops.parent / "train.trace"
    done = parity("record", f"{loops}:train", "--strategy", "ddp:accumulate=2", "--detail", "whole", "-o", path)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"wrote {path}: 4 steps of ddp:accumulate=2, loss ")
    return path


def test_a_loop_of_ones_own_is_recorded_as_one_process_would_compute_it(loops: Path, recorded: Path) -> None:
    space: dict[str, Any] = {}
    exec(_LOOPS, space)
    model, optimizer = space["made"]()
    trace = Trace.load(recorded)
    step = 0
    for _ in range(2):
        for lengths in ([1, 2], [3]):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            batches = [space["rows"](10 * rank + length, length) for rank in range(2) for length in lengths]
            losses = [(model(batch).squeeze(1) - batch.sum(1)).square().sum() for batch in batches]
            (torch.stack(losses).sum() / sum(map(len, batches))).backward()
            for index, (name, value) in enumerate(model.named_parameters()):
                assert value.grad is not None
                assert torch.allclose(trace.whole_gradients[name][step], value.grad, rtol=1e-5, atol=1e-7)
                assert torch.isclose(trace.gradient_norms[step, 0, index], value.grad.double().norm(), rtol=1e-5)
            seen = trace.losses[step].nan_to_num().flatten().sum()
            assert torch.isclose(seen, torch.stack(losses).detach().double().sum(), rtol=1e-5)
            assert trace.rates[step].tolist() == [0.1 / (1 + step)]
            optimizer.step()
            step += 1
    assert trace.steps == step
    assert trace.applied.all()
    for name, value in model.state_dict().items():
        assert torch.allclose(trace.final_weights[name], value, rtol=1e-5, atol=1e-7)


def test_another_run_of_a_loop_is_identical_and_another_strategys_is_at_parity(loops: Path, recorded: Path) -> None:
    again = loops.parent / "again.trace"
    done = parity("record", f"{loops}:train", "--strategy", "ddp:accumulate=2", "-o", again)
    assert done.exit_code == 0, done.output
    done = parity("compare", recorded, again, "--json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (0, "identical")

    strategies = "ddp:accumulate=2,deepspeed:stage=2,accumulate=2,ddp"
    done = parity("run", f"{loops}:train", "--strategies", strategies, "--repeats", 1, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    verdicts = [(row["strategy"], row["verdict"]) for row in report["rows"]]
    # A window of two micro-batches is not one of one: other batches in a step.
    wanted = [("ddp:accumulate=2", "unjudged"), ("deepspeed:stage=2,accumulate=2", "parity"), ("ddp", "no parity")]
    assert verdicts == wanted
    assert report["settings"].keys() == {"target", "processes", "seed", "device", "repeats"}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("silent", InputError, "loop 'silent' didn't record: it trains within `with record"),
        ("idle", TraceError, r"no step was recorded: call session\.step"),
        ("twice", InputError, "a loop records once: record was called again"),
    ],
)
def test_a_loop_that_doesnt_record_once_is_refused(
    tmp_path: Path, function: str, error: type[Exception], words: str
) -> None:
    space: dict[str, Any] = {}
    exec(_LOOPS, space)
    with pytest.raises(error, match=words):
        run_loop(space[function], Strategy("ddp"), str(tmp_path / "made.trace"))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fails", ": KeyError: 'planted'"),
        ("elsewhere", "the loop was given the strategy 'deepspeed:stage=2' and prepared 'ddp'"),
        ("three", "takes 3 arguments: a workload takes none, and a loop two, a strategy and record"),
        ("absent", "has no function 'absent': its functions are"),
    ],
)
def test_what_is_no_loop_or_fails_is_told(loops: Path, tmp_path: Path, function: str, words: str) -> None:
    path = tmp_path / "made.trace"
    done = parity("record", f"{loops}:{function}", "--strategy", "deepspeed:stage=2", "--timeout", 60, "-o", path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--strategy", "ddp"], "no workload is named 'nothing'"),
        (["absent.py", "--strategy", "ddp"], "there is no workload file 'absent.py'"),
        (["mlp", "--strategy", "dpp"], "did you mean 'ddp'"),
        (["mlp", "--strategy", "ddp:accumulate=2"], "use --accumulate"),
        (["mlp", "--strategy", "deepspeed:stage=9"], "stage"),
        (["{loops}:train", "--strategy", "ddp", "--steps", "3"], "has its own sizes: --steps is for workloads"),
    ],
)
def test_a_bad_argument_of_record_is_refused(loops: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    told = [one.format(loops=loops) for one in arguments]
    done = parity("record", *told, "-o", tmp_path / "made.trace")
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["absent/made.trace", ".", "file/made.trace"])
def test_a_place_where_no_trace_can_be_written_is_refused_before_anything_runs(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    done = parity("record", "mlp", "--strategy", "ddp", "-o", tmp_path / place)
    assert done.exit_code == 2
    assert "wrote" not in done.stdout
    assert str((tmp_path / place).parent if place != "." else tmp_path) in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cant_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = parity("record", "mlp", "--strategy", "ddp", "-o", tmp_path / "made.trace")
    assert done.exit_code == 2
    assert "is read-only" in done.stderr


def damaged(good: Path, folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.trace"
    content = bytearray(good.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[:-7])
    elif kind == "cut":
        path.write_bytes(content[:100])
    elif kind == "edited":
        content[-3] ^= 1
        path.write_bytes(content)
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("step,loss\n1,0.5\n" * 20)
    elif kind == "directory":
        path.mkdir()
    elif kind == "weights":
        save_file({"w": torch.ones(3)}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "can't be read: No such file or directory"),
        ("directory", "can't be read: Is a directory"),
        ("text", "text.trace"),
        ("empty", "empty.trace"),
        ("cut", "cut.trace"),
        ("truncated", "truncated.trace"),
        ("edited", "is damaged, or was edited: its checksum is not that of its content"),
        ("weights", "is no trace: record one with shardkit parity record"),
    ],
)
def test_a_file_that_is_no_whole_trace_is_refused(recorded: Path, tmp_path: Path, kind: str, words: str) -> None:
    bad = damaged(recorded, tmp_path, kind)
    for pair in [(recorded, bad), (bad, recorded)]:
        done = parity("compare", *pair)
        assert done.exit_code == 2
        assert words in done.stderr
        assert str(bad) in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert parity("compare", recorded, recorded, "--again", bad).exit_code == 2


def test_traces_of_other_models_and_of_other_lengths(loops: Path, recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.trace"
    done = parity("record", f"{loops}:other_model", "--strategy", "ddp", "-o", other)
    assert done.exit_code == 0, done.output
    done = parity("compare", recorded, other)
    assert done.exit_code == 2
    assert "incomparable: these runs can't be held against each other: the model differs" in done.stdout

    whole = Trace.load(recorded)
    cut = {name: getattr(whole, name)[:3] for name in ("losses", "batches", "rates", "applied", "seconds", "gradients")}
    Trace(whole.facts, **cut, weights=whole.weights[:4]).save(tmp_path / "short.trace")
    done = parity("compare", recorded, tmp_path / "short.trace", "--json")
    found = json.loads(done.stdout)
    [length] = [one for one in found["differences"] if one["kind"] == "length"]
    assert (length["a"], length["b"]) == (4, 3)


def test_plots_without_matplotlib_are_refused_with_the_way_to_get_it(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    done = parity("compare", recorded, recorded, "--output", tmp_path / "report")
    assert done.exit_code == 2
    assert 'pip install "shardkit[tools]"' in done.stderr
    assert not (tmp_path / "report").exists()


def test_the_documented_loop_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    space: dict[str, Any] = {}
    exec(page.partition("<!-- loop -->\n```python\n")[2].partition("```")[0], space)
    run_loop(space["train"], Strategy("ddp"), str(tmp_path / "run.trace"))
    trace = Trace.load(tmp_path / "run.trace")
    assert trace.steps == 10
    assert trace.loss[-1] < trace.loss[0]


def test_the_page_shows_every_option_of_the_mark_and_every_exit_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    assert all(f"| `{name}` |" in page for name in pytest_plugin._TYPES)
    assert all(f"`{name}`" in page for name in main.commands["parity"].commands)  # type: ignore[attr-defined]
