"""Environments of other versions, from packages made here: no test needs a network, but the slow one."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from shardkit.errors import InputError
from shardkit.parity import _environments, _index
from shardkit.parity._environments import (
    Environment,
    EnvironmentFailure,
    build,
    build_all,
    check_import,
    pair,
    parse_specs,
    stale_locks,
)
from tests.parity_tool.packages import install, sdist, wheel

PATIENCE = (2, 8, 32)
"""Seconds after which something is given up: more where the machine was too busy to come as far as it should."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip installs from, and nothing else; the cache is a fresh one."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, which this process and its children have."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    return folder


def printed(environment: Environment, code: str) -> str:
    """Return what a child of a child prints in an environment."""
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    environ = {**os.environ, **environment.variables()}
    return subprocess.run([sys.executable, "-c", inner], env=environ, capture_output=True, text=True, check=True).stdout


def failure_of(text: str, **how: float) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        build(parse_specs(text), **how)
    return caught.value


def hidden(cache: Path) -> list[Path]:
    return list((cache / "environments").glob(".*"))


# What is asked for


def test_a_side_names_packages_and_versions_and_installed_ones() -> None:
    specs = parse_specs("Some_Package == v1.0, pluggy==installed  packaging==installed")
    told = [(spec.name, spec.version, spec.installed) for spec in specs]
    import packaging
    import pluggy

    assert told[0] == ("some-package", "1.0", False)
    assert told[1:] == [("pluggy", pluggy.__version__, True), ("packaging", packaging.__version__, True)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no package"),
        (" , ", "names no package"),
        ("a>=1", "not >="),
        ("a===1", "not ==="),
        ("a==1, A==2", "names a twice"),
        ("a==one", "'one' is no version"),
        ("a==1.*", "no version"),
        ("a==", "'' is no version"),
        ("==1", "'' is no package's name"),
        ("--index==1", "no package's name"),
        ("a[b]==1", "no package's name"),
        ("a==1==2", "no version"),
        ("no-such-package-here==installed", "isn't installed"),
        ("no-such-package-here", "says no version"),
        ("shardkit==0.1", "shardkit is what compares"),
    ],
)
def test_a_side_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("[", r"\[").replace("*", r"\*")):
        parse_specs(text)


def test_both_sides_name_the_same_packages() -> None:
    before, after = pair(parse_specs("a==1,b==2"), parse_specs("b==3 a==1"))
    assert [spec.version for spec in after] == ["1", "3"]
    assert pair(before, before) == (before, before)
    for sides in [("a==1", "a==1,b==1"), ("a==1,b==1", "a==1")]:
        with pytest.raises(InputError, match=r"b is in .* but not in"):
            pair(*map(parse_specs, sides))


# What is built


def test_the_overlay_hides_the_installed_version_and_shares_the_rest(index: Path, site: Path) -> None:
    install(wheel(index, "one", "1.0"), site)
    install(wheel(index, "rest", "5.0"), site)
    wheel(index, "one", "2.0", requires=["rest"])
    made = build(parse_specs("one==2.0"))
    code = "import one, rest; print(one.__version__, rest.__version__, rest.__file__)"
    assert printed(made, code).split() == ["2.0", "5.0", str(site / "rest" / "__init__.py")]
    assert made.installed == {"one": "2.0"}
    assert made.notes == ()
    assert not made.cached
    imported = check_import(made)["one"]
    assert (imported.version, imported.distribution) == ("2.0", "2.0")
    assert made.overlay is not None
    assert Path(imported.file) == made.overlay / "one" / "__init__.py"


def test_what_is_installed_needs_no_overlay_and_no_pip(
    index: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(wheel(index, "one", "1.0+local"), site)
    monkeypatch.setattr(_environments._overlay, "run_pip", None)
    made = build(parse_specs("one==installed"))
    assert made.overlay is None
    assert set(made.variables()) == {"TORCH_EXTENSIONS_DIR"}
    assert check_import(made)["one"].version == "1.0+local"
    # Of the same number, and so the same.
    assert build(parse_specs("one==1.0")).folder == made.folder


def test_a_version_that_is_installed_from_a_folder_is_taken_from_the_index(index: Path, site: Path) -> None:
    install(wheel(index, "one", "1.0"), site)
    told = {"url": "file:///somewhere", "dir_info": {"editable": True}}
    (site / "one-1.0.dist-info" / "direct_url.json").write_text(json.dumps(told))
    assert build(parse_specs("one==installed")).overlay is None
    assert build(parse_specs("one==1.0")).installed == {"one": "1.0"}


def test_requirements_that_nobody_has_are_installed_until_none_is_missing(index: Path, site: Path) -> None:
    install(wheel(index, "rest", "5.0"), site)
    wheel(index, "rest", "6.0")
    wheel(index, "second", "1.0", requires=["third[more]>=1", "rest"], files={"space/second.py": ""})
    wheel(index, "third", "1.5", requires=["fourth; extra == 'more'", "fifth; extra == 'less'"])
    wheel(index, "fourth", "1.0")
    wheel(
        index,
        "one",
        "1.0",
        requires=["second", "absent; python_version < '3'", "absent; extra == 'more'"],
        files={"one.py": "", "space/one.py": ""},
    )
    made = build(parse_specs("one==1.0"))
    assert made.installed == {"one": "1.0", "second": "1.0", "third": "1.5", "fourth": "1.0"}
    # pip itself would have left out the second package's part of the folder that both have.
    assert printed(made, "import space.one, space.second, rest; print(rest.__version__)").strip() == "5.0"
    # By now it is installed: the one in the overlay would hide it.
    install(wheel(index, "third", "2.0", requires=["fourth; extra == 'more'"]), site)
    again = build(parse_specs("one==1.0"))
    assert not again.cached
    assert again.installed == {"one": "1.0", "second": "1.0"}


def test_a_requirement_that_another_version_meets_not_is_a_note(index: Path, site: Path) -> None:
    install(wheel(index, "rest", "5.0"), site)
    wheel(index, "one", "1.0", requires=["rest<2", "rest>=1"])
    made = build(parse_specs("one==1.0"))
    assert made.notes == ("one 1.0 asks for rest<2; 5.0 is installed",)
    assert made.installed == {"one": "1.0"}
    assert build(parse_specs("one==1.0")).notes == made.notes


def test_a_requirement_that_hides_an_installed_module_is_a_note(index: Path, site: Path) -> None:
    install(wheel(index, "rest", "5.0"), site)
    wheel(index, "slim", "1.0", files={"rest/__init__.py": "", "slim.py": ""})
    wheel(index, "one", "1.0", requires=["slim"])
    note = f"slim, which is needed, has a module 'rest' that hides the installed {site}/rest/__init__.py"
    assert build(parse_specs("one==1.0")).notes == (note,)


def test_a_requirement_that_cant_be_had_is_a_failure_of_the_version(index: Path) -> None:
    wheel(index, "one", "1.0", requires=["absent>=3"])
    failure = failure_of("one==1.0")
    assert (failure.package, failure.version, failure.stage) == ("one", "1.0", "did not install")
    assert failure.reason == "one needs absent>=3, which isn't installed: the index has no release of absent"
    wheel(index, "absent", "2.5")
    assert failure_of("one==1.0").reason.endswith("no release of absent is one of absent>=3; the last one is 2.5")


def test_several_packages_are_in_one_overlay_and_compile_to_a_folder_of_their_own(index: Path) -> None:
    for name, version in [("one", "1.0"), ("one", "2.0"), ("two", "1.0")]:
        wheel(index, name, version)
    before, after = build_all([parse_specs("one==1.0,two==1.0"), parse_specs("one==2.0,two==1.0")])
    assert isinstance(before, Environment)
    assert isinstance(after, Environment)
    assert printed(after, "import one, two; print(one.__version__, two.__version__)").split() == ["2.0", "1.0"]
    folders = {made.variables()["TORCH_EXTENSIONS_DIR"] for made in (before, after)}
    assert len(folders) == 2
    assert all(Path(folder).is_dir() for folder in folders)


# What can't be built


def test_a_version_that_does_not_exist_is_told_with_the_nearest(index: Path) -> None:
    for version in ("0.9", "1.0", "1.1", "1.3", "1.4rc1", "1.4", "2.0"):
        wheel(index, "one", version)
    wheel(index, "two", "1.0")
    missing, made = build_all([parse_specs("one==1.2"), parse_specs("two==1.0")])
    assert isinstance(missing, EnvironmentFailure)
    assert (missing.package, missing.version, missing.stage) == ("one", "1.2", "no such version")
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert missing.reason == f"there is no one 1.2 for {python}; the nearest are 1.0, 1.1, 1.3 and 1.4"
    assert str(missing) == f"one 1.2: no such version: {missing.reason}"
    assert isinstance(made, Environment)
    assert failure_of("absent==1").reason == "the index has no release of absent"


def test_a_build_that_fails_is_told_with_its_error_and_its_last_lines(index: Path, tmp_path: Path) -> None:
    sdist(index, "one", "1.0", "print('about to fail'); raise RuntimeError('no compiler here')")
    failure = failure_of("one==1.0")
    assert failure.stage == "did not install"
    assert failure.reason == "RuntimeError: no compiler here"
    assert any("about to fail" in line for line in failure.details)
    assert hidden(tmp_path / "cache") == []


def test_a_build_that_needs_isolation_gets_it(index: Path) -> None:
    # A module that is not installed, but that the build asks for.
    wheel(index, "maker", "1.0")
    sdist(index, "one", "1.0", "import maker", build_requires=["maker"])
    said: list[str] = []
    made = build(parse_specs("one==1.0"), progress=lambda name, text: said.append(f"{name}: {text}"))
    assert made.installed == {"one": "1.0"}
    again = "one 1.0: once more, with what it asks for to build: ModuleNotFoundError: No module named 'maker'"
    assert again in said
    assert said[-1].startswith("one 1.0: ready after")


def test_a_build_that_hangs_ends_with_all_that_it_started(index: Path, tmp_path: Path) -> None:
    told = tmp_path / "child"
    code = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {told}; sleep 600'])"
    sdist(index, "one", "1.0", code)
    for seconds in PATIENCE:
        failure = failure_of("one==1.0", timeout=seconds)
        assert failure.stage == "timed out"
        assert failure.reason.startswith(f"pip took over {seconds} s")
        if told.exists():
            break
    assert_ends(int(told.read_text()))


def test_a_constraint_that_forbids_a_version_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "one", "1.0")
    (tmp_path / "pins.txt").write_text("one==2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "pins.txt"))
    failure = failure_of("one==1.0")
    assert failure.stage == "did not install"
    assert failure.reason == "a constraint of pip's configuration forbids it: one==2.0"


def test_a_python_without_pip_is_told_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    failure = failure_of("one==1.0")
    assert failure.stage == "did not install"
    assert failure.reason == f"{sys.executable} has no pip: {sys.executable} -m ensurepip"


def test_without_network_what_is_cached_and_what_is_installed_still_works(
    index: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(wheel(index, "one", "1.0"), site)
    wheel(index, "one", "2.0")
    build(parse_specs("one==2.0"))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert build(parse_specs("one==2.0")).cached
    assert build(parse_specs("one==installed")).overlay is None
    failure = failure_of("one==3.0")
    assert failure.stage == "no network"
    assert failure.reason.startswith("the index can't be reached: http://127.0.0.1:9/simple/one/: ")
    assert "refused" in failure.reason
    with pytest.raises(EnvironmentFailure) as caught:
        _index.versions("one")
    assert caught.value.stage == "no network"


@pytest.fixture
def served(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """An index over HTTP that has no package; its answer is 404 unless told otherwise. Told "page", it lists a file."""
    answer = {"code": 404}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "page" in answer and self.path.endswith("/one/"):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b'<a href="one-1.0-py3-none-any.whl">one-1.0-py3-none-any.whl</a>')
            else:
                self.send_error(answer["code"])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01))
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_index_that_knows_no_such_package_is_told_from_one_that_is_down(served: dict[str, int]) -> None:
    assert failure_of("one==1.0").stage == "no such version"
    served["code"] = 502
    assert failure_of("one==1.0").stage == "no network"
    # It answers, but the file can't be had.
    served["page"] = 1
    assert failure_of("one==1.0").stage == "no network"


def test_a_cache_that_cant_be_written_is_told_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "file"))
    wheel(index, "one", "1.0")
    failure = failure_of("one==1.0")
    assert failure.stage == "did not install"
    assert "SHARDKIT_CACHE" in failure.reason
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "a:b"))
    with pytest.raises(InputError, match="can't be in PYTHONPATH"):
        build(parse_specs("one==1.0"))


# The cache


def test_a_cached_environment_is_found_in_milliseconds(index: Path) -> None:
    wheel(index, "one", "1.0")
    made = build(parse_specs("one==1.0"))
    shutil.rmtree(index)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        found = build(parse_specs("one==1.0"))
        seconds.append(time.perf_counter() - begun)
    assert found.cached
    assert found.folder == made.folder
    assert found.seconds == made.seconds
    assert min(seconds) < 0.1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no stamp": lambda folder: (folder / "environment.json").unlink(),
    "half a stamp": lambda folder: (folder / "environment.json").write_text("{"),
    "no metadata": lambda folder: shutil.rmtree(folder / "overlay" / "one-1.0.dist-info"),
    "no module": lambda folder: (folder / "overlay" / "one" / "__init__.py").unlink(),
    "an edited module": lambda folder: (folder / "overlay" / "one" / "__init__.py").write_text(""),
    "no folder to compile to": lambda folder: shutil.rmtree(folder / "extensions"),
}


def test_a_damaged_environment_is_built_anew(index: Path, tmp_path: Path) -> None:
    wheel(index, "one", "1.0")
    made = build(parse_specs("one==1.0"))
    for name, damage in DAMAGES.items():
        damage(made.folder)
        made = build(parse_specs("one==1.0"))
        assert not made.cached, name
        assert build(parse_specs("one==1.0")).cached, name
        assert printed(made, "import one; print(one.__version__)").strip() == "1.0", name
        assert hidden(tmp_path / "cache") == [], name


def test_two_builders_at_once_make_one_environment(index: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    sdist(index, "one", "1.0", f"open({str(count)!r}, 'a').write(folder + chr(10)); time.sleep(1)")
    said: list[str] = []
    sides = [parse_specs("one==1.0")] * 2
    first, second = build_all(sides, progress=lambda name, text: said.append(text))
    assert isinstance(first, Environment)
    assert isinstance(second, Environment)
    assert sorted([first.cached, second.cached]) == [False, True]
    assert first.folder == second.folder
    assert said.count("install one 1.0") == 1
    assert f"waiting: process {os.getpid()} builds it" in said


SLOW_BUILD = "open({told!r}, 'w').write(str(os.getpid())); time.sleep(600 if os.path.exists({slow!r}) else 0)"
BUILDS = """
from shardkit.parity._environments import build_all, parse_specs
build_all([parse_specs("one==1.0"), parse_specs("two==1.0")])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing_that_is_trusted(index: Path, tmp_path: Path, how: signal.Signals) -> None:
    told, slow = tmp_path / "told", tmp_path / "slow"
    slow.touch()
    sdist(index, "one", "1.0", SLOW_BUILD.format(told=str(told), slow=str(slow)))
    wheel(index, "two", "1.0")
    builder = subprocess.Popen([sys.executable, "-c", BUILDS], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (told.exists() and told.read_text()):
            assert builder.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        builder.send_signal(how)
        builder.wait(20)
    finally:
        builder.kill()
        builder.wait()
    # pip, and what it ran, are gone too.
    assert_ends(int(told.read_text()))
    left = hidden(tmp_path / "cache")
    assert any(path.name.startswith(".one-1.0-") for path in left) == bool(left) == (how == signal.SIGKILL)
    slow.unlink()
    wheel(index, "three", "1.0")
    # Another's leftovers go too, since nobody builds it.
    assert not build(parse_specs("three==1.0")).cached
    assert hidden(tmp_path / "cache") == []
    made = build(parse_specs("one==1.0"))
    assert not made.cached
    assert check_import(made)["one"].version == "1.0"


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            os.kill(pid, 0)
            # One that nobody has waited for yet is dead all the same.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.05)


# Runs in it


def test_locks_of_killed_builds_go_when_a_run_begins_but_never_under_another_run(index: Path, site: Path) -> None:
    install(wheel(index, "one", "1.0"), site)
    made = build(parse_specs("one==installed"))
    lock = made.extensions / "some_op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert stale_locks(made.extensions) == [lock]
    first, second, third = (contextlib.ExitStack() for _ in range(3))
    first.enter_context(made.in_use())
    assert not lock.exists()
    lock.touch()  # of what one of the runs compiles
    second.enter_context(made.in_use())
    first.close()
    third.enter_context(made.in_use())
    assert lock.exists()
    second.close()
    third.close()
    with made.in_use():
        assert not lock.exists()
    shutil.rmtree(made.folder)
    with pytest.raises(EnvironmentFailure, match="is gone from the cache"), made.in_use():
        pass


# Whether it imports


LOCKED = """
import os, pathlib, time
lock = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "some_op", "lock")
lock.parent.mkdir(exist_ok=True)
lock.touch()
time.sleep(600)
"""
BROKEN = {
    "raises": ("raise RuntimeError('not on this torch')", "raised RuntimeError: not on this torch"),
    "lacks": ("import nowhere", "raised ModuleNotFoundError: No module named 'nowhere'"),
    "leaves": ("print('please install it'); raise SystemExit(1)", "raised SystemExit: 1: please install it"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
    "ends": ("import os; os._exit(3)", "ended the process with code 3"),
    "ends_well": ("import os; os._exit(0)", "ended the process with code 0"),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment of a package of which no module can be imported."""
    folder = tmp_path_factory.mktemp("broken")
    files = {f"{module}.py": code for module, (code, _) in BROKEN.items()}
    files |= {"hangs.py": "import time; time.sleep(600)", "locked.py": LOCKED}
    wheel(folder, "one", "1.0", files=files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("SHARDKIT_CACHE", str(folder / "cache"))
        return build(parse_specs("one==1.0"))


@pytest.mark.parametrize("module", BROKEN)
def test_an_import_that_fails_is_told_with_how(broken: Environment, module: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        check_import(broken, [module])
    assert (caught.value.package, caught.value.version, caught.value.stage) == ("one", "1.0", "did not import")
    assert caught.value.reason == f"import {module} {BROKEN[module][1]}"


@pytest.mark.parametrize("module", ["hangs", "locked"])
def test_an_import_that_hangs_is_told_with_the_lock_that_it_may_wait_for(broken: Environment, module: str) -> None:
    lock = f"; it may wait for the build lock {broken.extensions}/some_op/lock" if module == "locked" else ""
    for seconds in PATIENCE:
        with pytest.raises(EnvironmentFailure) as caught:
            check_import(broken, ["json", module], seconds)
        assert caught.value.stage == "timed out"
        # The module before it isn't blamed.
        if caught.value.reason == f"import {module} took over {seconds} s{lock}":
            return
    pytest.fail(caught.value.reason)


def test_a_module_that_comes_from_elsewhere_is_not_taken_for_the_version(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "one", "1.0")
    for name in ("one", "pip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    made = build(parse_specs("one==1.0"))
    with pytest.raises(EnvironmentFailure, match=f"import one finds {tmp_path}/one/__init__.py, not {made.overlay}"):
        check_import(made)


def test_importing_the_module_loads_no_torch() -> None:
    code = "import sys, shardkit.parity._environments, shardkit.parity._index; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# Which versions there are


def test_the_versions_of_a_package_are_sorted_and_final(index: Path) -> None:
    for version in ("1.10", "1.9", "2.0rc1", "0.9"):
        wheel(index, "one", version)
    assert _index.versions("one") == [Version("0.9"), Version("1.9"), Version("1.10")]
    assert Version("2.0rc1") in _index.versions("one", prereleases=True)


def test_the_versions_of_no_package_are_a_failure(index: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="the index has no release of absent") as caught:
        _index.versions("absent")
    assert caught.value.stage == "no such version"
    with pytest.raises(InputError):
        _index.versions("--pre")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("deepspeed==0.18.9", None),
        ("fairscale==0.4.12", None),
        ("fairscale==0.4.7", "import fairscale raised SystemExit: 1: Error: please pip install pygit2"),
    ],
)
def test_real_versions_install_and_import_or_say_why_not(
    text: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path))
    name, version = text.split("==")
    assert Version(version) in _index.versions(name)
    made = build(parse_specs(text))
    assert made.installed[name] == version
    if problem is None:
        imported = check_import(made)[name]
        assert (imported.version, imported.distribution) == (version, version)
    else:
        with pytest.raises(EnvironmentFailure, match=problem):
            check_import(made)
