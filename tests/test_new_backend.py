"""``shardkit new-backend`` writes a package that installs, trains right and passes the suite as it is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import shardkit
from shardkit.cli import main
from shardkit.errors import UnsupportedError
from shardkit.scaffold._write import FILES, _range
from shardkit.testing import run

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"

PIP = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
)
"""What is there already is used: nothing comes from an index."""


def command(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["new-backend", *arguments])
    assert isinstance(result.exception, SystemExit | None)
    return result


def written(folder: Path) -> dict[str, str]:
    """Return the files in a folder, but for what tools leave there."""
    left = {".ruff_cache", ".pytest_cache", "__pycache__"}
    paths = [path for path in folder.rglob("*") if path.is_file() and not left & set(path.parts)]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_it_writes_a_package_named_after_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("my-ring")
    assert result.exit_code == 0
    found = written(tmp_path / "shardkit-my-ring")
    assert list(tmp_path.iterdir()) == [tmp_path / "shardkit-my-ring"]
    assert set(found) == {path.replace("{{ module }}", "shardkit_my_ring") for path in FILES}
    assert 'my-ring = "shardkit_my_ring"' in found["pyproject.toml"]
    assert "class MyRingEngine(Engine):" in found["src/shardkit_my_ring/_engine.py"]
    assert 'backend = "my-ring"' in found["tests/test_backend.py"]
    for path, text in found.items():
        assert path in result.stdout
        assert "{{" not in text.replace("${{", ""), path
        assert "allreduce" not in text, path
    assert 'cd shardkit-my-ring && pip install -e ".[test]" && pytest' in result.stdout


def test_with_json_it_tells_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b c"
    told = json.loads(command("mine", "--directory", str(place), "--json").stdout)
    assert told["directory"] == str(place)
    assert (told["name"], told["distribution"], told["module"]) == ("mine", "shardkit-mine", "shardkit_mine")
    assert set(told["files"]) == set(written(place))
    assert told["next"] == [f"cd '{place}'", 'pip install -e ".[test]"', "pytest"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    assert command("mine", "--directory", str(tmp_path)).exit_code == 0
    assert "pyproject.toml" in written(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Mine", "lower-case letters and digits, with single dashes or underscores between them"),
        ("my:ring", "lower-case letters"),
        ("2d", "lower-case letters"),
        ("my--ring", "single dashes"),
        ("-", "lower-case letters"),
        ("mine.json", "lower-case letters"),
        ("../mine", "lower-case letters"),
        ("été", "lower-case letters"),
        ("auto", "'auto' has a meaning of its own"),
        ("a" * 41, "at most 40 characters, not 41"),
        ("ddp", "'ddp' is taken by distribution shardkit"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("--", name)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_name_whose_module_or_distribution_is_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shardkit_there.py").write_text("")
    assert "a module shardkit_there is there already" in command("there", "--directory", str(tmp_path / "a")).stderr
    (tmp_path / "shardkit_other-3.1.dist-info").mkdir()
    (tmp_path / "shardkit_other-3.1.dist-info" / "METADATA").write_text("Name: shardkit-other\nVersion: 3.1\n")
    result = command("other", "--directory", str(tmp_path / "a"))
    assert "a distribution shardkit-other is installed, version 3.1" in result.stderr
    assert result.exit_code == 2
    assert not (tmp_path / "a").exists()


def test_a_directory_that_holds_something_or_cannot_be_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    for place, says in (
        (tmp_path, "is not empty"),
        (tmp_path / "kept", "is no directory"),
        (tmp_path / "kept" / "x", ""),
    ):
        result = command("mine", "--directory", str(place))
        assert result.exit_code == 2
        assert repr(str(place)) in result.stderr
        assert says in result.stderr
    assert written(tmp_path) == {"kept": "mine"}


@pytest.mark.parametrize("there", [True, False])
def test_when_the_disk_is_full_nothing_is_left_behind(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.write_text

    def write(self: Path, *arguments: Any, **named: Any) -> int:
        if self.name == "_engine.py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", write)
    place = tmp_path / "new"
    if there:
        place.mkdir()
    result = command("mine", "--directory", str(place))
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert place.exists() == there
    assert not written(tmp_path)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.1.0", ">=0.1,<0.2"),
        ("0.12.3", ">=0.12,<0.13"),
        ("0.4.0.dev1", ">=0.4,<0.5"),
        ("1.3.2", ">=1.3,<2"),
        ("2", ">=2.0,<3"),
    ],
)
def test_the_range_of_shardkit_is_where_hooks_keep_their_form(version: str, fits: str) -> None:
    assert _range(version) == fits


def test_the_example_is_what_the_command_writes(tmp_path: Path) -> None:
    command("allreduce", "--directory", str(tmp_path / "made"))
    example = EXAMPLES / "shardkit-allreduce"
    # To write the example anew: shardkit new-backend allreduce, into its directory once that is empty.
    assert written(tmp_path / "made") == written(example)


# As a third party has it: installed into a folder.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip installed what the command wrote, and the example of a wrapper."""
    folder = tmp_path_factory.mktemp("made")
    assert command("my-ring", "--directory", str(folder / "my-ring")).exit_code == 0
    packages = [str(folder / "my-ring"), str(EXAMPLES / "shardkit-logged")]
    subprocess.run([sys.executable, *PIP, "--target", str(folder / "site"), *packages], check=True)
    return folder / "site"


def python(site: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "plugins")])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True)


def test_it_describes_itself_without_torch_and_brings_its_options(site: Path) -> None:
    code = (
        "import sys, shardkit\nfound = shardkit.backends()['my-ring']\n"
        "print(found.variants[0].strategy, sorted(found.precisions), 'torch' in sys.modules)\n"
        "from shardkit.tools.listing import options\nprint(options('my-ring')[0]['name'], 'torch' in sys.modules)\n"
    )
    assert python(site, code).stdout.splitlines() == ["my-ring ['bf16', 'fp16', 'fp32'] False", "bucket_mb False"]


class Words(nn.Module):
    """An embedding with sparse gradients, or a weight."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.w = nn.Embedding(1, 2, sparse=sparse)
        nn.init.zeros_(self.w.weight)

    def forward(self, a: float, b: float) -> torch.Tensor:
        return (self.w(torch.tensor([0])) * torch.tensor([a, b])).sum()


def _train(site: str) -> dict[str, Any]:
    sys.path.insert(0, site)
    rank, found = int(os.environ["RANK"]), {}
    strategy = shardkit.Strategy("my-ring", accumulate=2, max_grad_norm=1.0, options={"bucket_mb": 1})
    model = Words()
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy) as session:
        for micro in range(2):
            # The mean over ranks and micro-batches is (3, 4).
            session.backward(session.model([2, 4, 1, 5][2 * rank + micro], 4))
            moved = session.step()
        found["step"] = (moved, session.grad_norm, model.w.weight.tolist())
    model = Words(sparse=True)
    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "my-ring") as session:
        try:
            session.backward(session.model(1, 1))
        except UnsupportedError as error:
            found["sparse"] = str(error)
    return found


def test_it_trains_on_two_ranks_as_by_hand_and_refuses_the_same_on_both(site: Path) -> None:
    ranks = run(_train, str(site), processes=2, timeout=120)
    for found in ranks:
        moved, norm, weight = found["step"]
        assert moved
        assert norm == pytest.approx(5.0)
        # Clipped from (3, 4) to the length 1.
        assert weight == [pytest.approx([-0.6, -0.8])]
        assert "backend 'my-ring' can't average the sparse gradient of 'w.weight'" in found["sparse"]
    assert ranks[0] == ranks[1]


def test_the_example_of_a_wrapper_logs_every_prepare_and_compiles_if_asked(site: Path) -> None:
    code = (
        "import logging, torch, shardkit\nlogging.basicConfig(level=logging.INFO)\n"
        "class Layer(torch.nn.Linear):\n    def forward(self, x): return super().forward(x).sum()\n"
        "for strategy in ('ddp', 'my-ring'):\n"
        "    model = Layer(2, 1, bias=False)\n    torch.nn.init.ones_(model.weight)\n"
        "    with shardkit.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session:\n"
        "        session.backward(session.model(torch.ones(2)))\n        session.step()\n"
        "    print([round(value, 6) for value in model.weight.flatten().tolist()], session.model is model)\n"
        "print(torch._dynamo.utils.counters['stats']['unique_graphs'])\n"
    )
    done = python(site, code, SHARDKIT_LOGGED_COMPILE="eager")
    assert done.stdout.splitlines() == ["[0.9, 0.9] True", "[0.9, 0.9] True", "1"]
    logged = [line for line in done.stderr.splitlines() if line.startswith("INFO:shardkit_logged:")]
    assert [line.rpartition(" in ")[0] for line in logged] == [
        "INFO:shardkit_logged:ddp on rank 0: DDPEngine",
        "INFO:shardkit_logged:my-ring on rank 0: MyRingEngine",
    ]


@pytest.mark.slow
def test_in_a_fresh_environment_it_installs_and_passes_the_suite_at_once(tmp_path: Path) -> None:
    """As a third party would, but for libraries that are there already, which the environment sees."""
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "installed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    # No PYTHONPATH: shardkit is the one that was built and installed, with its templates.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own = str(tmp_path / "venv" / "bin" / "python")
    # What is installed where the tests run stays.
    subprocess.run([own, *PIP, "--ignore-installed", str(ROOT)], env=clean, check=True)
    tool = [str(tmp_path / "venv" / "bin" / "shardkit")]
    subprocess.run([*tool, "new-backend", "my-ring"], cwd=tmp_path, env=clean, check=True)
    package = tmp_path / "shardkit-my-ring"
    subprocess.run([own, *PIP, "--ignore-installed", str(package)], env=clean, check=True)
    where = [own, "-c", "import shardkit; print(shardkit.__file__)"]
    found = subprocess.run(where, cwd=package, env=clean, check=True, capture_output=True, text=True).stdout
    assert found.strip() == str(site / "shardkit" / "__init__.py")
    test = [own, "-m", "pytest", "-q"]
    done = subprocess.run(test, cwd=package, env=clean, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "failed" not in done.stdout
    told = json.loads(subprocess.run([*tool, "backends", "--json"], env=clean, capture_output=True, check=True).stdout)
    assert {backend["name"]: backend["origin"] for backend in told}["my-ring"] == "distribution shardkit-my-ring 0.1.0"
