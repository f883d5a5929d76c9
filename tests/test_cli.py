"""The command line: what it prints, where, with which exit code, and how soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardkit
from shardkit.cli import main
from tests.test_architecture import HEAVY, loaded_after


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    # An exception that the command doesn't turn into a message is a traceback to its user.
    assert isinstance(result.exception, SystemExit | None)
    return result


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("output")
    options = ("--workload", "mlp", "--strategies", "ddp,ddp:bucket_cap_mb=1", "--steps", "3", "--device", "cpu")
    return run("compare", *options, "--json", "--output", str(folder)), folder


def test_compare_prints_json_alone_on_stdout(compared: tuple[Result, Path]) -> None:
    result, folder = compared
    told = json.loads(result.stdout)
    assert [row["strategy"] for row in told["strategies"]] == ["ddp", "ddp:bucket_cap_mb=1"]
    assert {row["status"] for row in told["strategies"]} == {"agrees"}
    assert told["settings"]["steps"] == 3
    assert json.loads((folder / "compare.json").read_text()) == told
    assert (folder / "compare.png").stat().st_size > 10_000


def test_compare_exits_with_0_and_tells_its_progress_on_stderr(compared: tuple[Result, Path]) -> None:
    result, _ = compared
    assert result.exit_code == 0
    assert "ddp: agrees in" in result.stderr
    assert "ddp: agrees in" not in result.stdout


def test_compare_prints_a_table_and_exits_with_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.tools import compare
    from shardkit.tools.compare import Comparison, Row

    settings = {"workload": "mlp", "steps": 2, "device": "cpu", "processes": 2, "accumulate": 1, "batch_size": 8}
    rows = [
        Row("right", "agrees", losses=[2.0, 1.5], loss_difference=0.0, samples_per_second=10.0, peak_memory=[2**20]),
        Row("wrong", "differs", "step 2: loss 2, the reference's is 1.5", losses=[2.0, 2.0], loss_difference=0.25),
    ]
    found = Comparison({**settings, "tolerance": 1e-6}, {}, Row("reference", "reference", losses=[2.0, 1.5]), rows)
    monkeypatch.setattr(compare, "compare", lambda *arguments, **options: found)
    result = run("compare")
    assert result.exit_code == 1
    for text in ("right", "1.500000", "10.0", "1.0", "agrees", "differs", "2.5e-01", "wrong: step 2: loss 2"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "--workload", "mlpp"), "Error: no workload is named 'mlpp': did you mean 'mlp'?"),
        (("compare", "--workload", "none.py"), "Error: there is no workload file 'none.py'"),
        (("compare", "--strategies", "dpd"), "Error: no backend is named 'dpd': did you mean 'ddp'?"),
        (("compare", "--max-grad-norm", "0"), "Error: strategy field 'max_grad_norm' is above 0"),
        (("compare", "--steps", "0"), "Invalid value for '--steps'"),
        (("backends", "dpd"), "Error: no backend is named 'dpd': did you mean 'ddp'?"),
    ],
)
def test_what_is_refused_is_one_line_on_stderr_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_workload_of_ones_own_that_breaks_its_promise_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import itertools, torch, shardkit\n"
        "print('noise at import')\n"
        "def workload():\n"
        "    torch.manual_seed(0)\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    return shardkit.Workload(model, torch.optim.SGD(model.parameters(), lr=.1),\n"
        "        lambda model, batch: model(batch).mean(), lambda size: itertools.repeat(torch.ones(3, 2)))\n"
    )
    result = run("compare", "--workload", str(own), "--strategies", "ddp", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "batches(8) of the workload yields 3 samples" in result.stderr


def test_backends_lists_what_is_there_and_the_options_of_one() -> None:
    listed = {backend["name"]: backend for backend in json.loads(run("backends", "--json").stdout)}
    assert listed["ddp"]["installed"]
    options = {option["name"]: option for option in json.loads(run("backends", "ddp", "--json").stdout)}
    assert options["bucket_cap_mb"]["unit"] == "MiB"
    assert "bucket_cap_mb" in run("backends", "ddp").stdout
    assert "DistributedDataParallel" in run("backends").stdout + listed["ddp"]["summary"]


def test_doctor_exits_with_1_where_there_is_a_problem_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "none")
    result = run("doctor")
    assert result.exit_code == 1
    assert "unset MASTER_PORT" in result.stdout
    found = {finding["check"]: finding for finding in json.loads(run("doctor", "--json").stdout)}
    assert found["MASTER_PORT"]["level"] == "problem"
    monkeypatch.setattr("shardkit.tools.doctor.examine", lambda: [shardkit.Finding("all", "note", "harmless")])
    assert run("doctor").exit_code == 0


@pytest.mark.parametrize("command", ["compare", "backends", "doctor"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"Example: shardkit {command}" in run(command, "--help").stdout


def test_help_loads_neither_torch_nor_the_tools() -> None:
    loaded = loaded_after("from shardkit.cli import main\nmain(['compare', '--help'], standalone_mode=False)")
    assert not loaded & (HEAVY | {"rich", "pluggy"})


def test_backends_and_doctor_load_no_torch() -> None:
    for command in ("backends", "doctor"):
        quietly = f"with contextlib.redirect_stdout(io.StringIO()): main(['{command}'], standalone_mode=False)"
        script = f"import contextlib, io\nfrom shardkit.cli import main\n{quietly}"
        assert not loaded_after(script) & HEAVY


def test_help_and_import_are_quick() -> None:
    # The least of several CPU times, since other programs share the machine; the promise is 300 ms and 50 ms.
    assert least_seconds("import shardkit") - least_seconds("pass") < 0.05
    assert least_seconds("from shardkit.cli import main; main(['--help'], standalone_mode=False)") < 0.3


def least_seconds(code: str) -> float:
    script = f"{code}\nimport time; print('\\n' + str(time.process_time()))"
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(5)]
    return min(float(done.stdout.split()[-1]) for done in runs)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the processes of a session from /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_an_end_from_outside_leaves_no_process_behind(sent: signal.Signals, tmp_path: Path) -> None:
    own = tmp_path / "slow.py"
    own.write_text(
        "import pathlib, time, torch\nfrom shardkit.workloads import mlp\n"
        "import dataclasses\n"
        "def loss(model, batch):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'begun').touch()\n"
        "    time.sleep(0.2)\n"
        "    return mlp.loss(model, batch)\n"
        "def workload():\n"
        "    return dataclasses.replace(mlp.workload(), loss=loss)\n"
    )
    command = [sys.executable, "-m", "shardkit", "compare", "--workload", str(own), "--steps", "1000"]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A shell starts what runs in its background deaf to Ctrl-C, and so would be what that starts.
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: (tmp_path / "begun").exists())
        assert len(of_session(process.pid)) > 1
        # A terminal sends Ctrl-C to all processes in its foreground, other programs to the one that they know.
        os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
        _, printed = process.communicate(timeout=30)
        assert process.returncode == 128 + sent
        assert b"Traceback" not in printed
        wait_for(lambda: not of_session(process.pid))
    finally:
        for left in of_session(process.pid):
            os.kill(left, signal.SIGKILL)
        process.communicate()


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def of_session(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found
