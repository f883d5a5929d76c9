"""Run pip, or any Python, as a child that can't outlive us, and say in one line why pip failed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from shardkit.errors import ShardkitError

Stage = Literal["no such version", "no network", "did not install", "did not import", "timed out"]

DETAILS = 40
"""How many of the last lines that were printed a failure keeps."""

# The thread ends the whole group when the pipe does: with us, however we die.
_WATCHED = """
import os, runpy, sys, threading
def watch(pipe):
    while os.read(pipe, 1):
        pass
    os.kill(0, 9)
threading.Thread(target=watch, args=(int(sys.argv.pop(1)),), daemon=True).start()
"""

# What would change where pip installs to, or keep it from doing so.
_UNWANTED = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN", "PIP_QUIET", "PIP_VERBOSE", "PIP_LOG")


class EnvironmentFailure(ShardkitError):  # noqa: N818 - of the tool's subject, not of the tool
    """A version of a package could not be had, or not be imported.

    ``stage`` says how far it came, ``reason`` why in one line, and ``details`` are the last lines of what was printed.
    """

    def __init__(self, package: str, version: str, stage: Stage, reason: str, details: Sequence[str] = ()) -> None:
        super().__init__(package, version, stage, reason, tuple(details))
        self.package = package
        self.version = version
        self.stage: Stage = stage
        self.reason = reason
        self.details = tuple(details)

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip() + f": {self.stage}: {self.reason}"


class Ended(NamedTuple):
    """How a child ended: its exit code, ``None`` if it ran out of time, and what it printed."""

    code: int | None
    output: str


class StoppedError(Exception):
    """The caller asked for an end before the child had come to its own."""


def run_python(
    code: str,
    arguments: Sequence[str],
    output: Path,
    *,
    timeout: float,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    stop: Event | None = None,
    line: Callable[[str], None] | None = None,
) -> Ended:
    """Run code in a fresh interpreter, in a process group of its own that ends with us, at the latest after timeout.

    What it prints goes to the file ``output``; ``line`` is called with each line of it.
    """
    reader, writer = os.pipe()
    command = [sys.executable, *flags, "-c", _WATCHED + code, str(reader), *arguments]
    deadline = time.monotonic() + timeout
    process = None
    try:
        with output.open("wb") as file, output.open(errors="replace") as told:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                pass_fds=[reader],
                start_new_session=True,
            )
            pause, rest = 0.005, ""
            while True:
                try:
                    code_of_exit: int | None = process.wait(pause)
                except subprocess.TimeoutExpired:
                    code_of_exit = None
                *lines, rest = (rest + told.read()).split("\n")
                if line is not None:
                    for one in lines:
                        line(one)
                if code_of_exit is not None:
                    break
                if stop is not None and stop.is_set():
                    raise StoppedError
                if time.monotonic() > deadline:
                    break
                pause = min(2 * pause, 0.1)
    finally:
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(reader)
        os.close(writer)
    return Ended(code_of_exit, output.read_text(errors="replace"))


def run_pip(
    arguments: Sequence[str],
    folder: Path,
    *,
    package: str,
    version: str,
    timeout: float,
    overlay: Path | None = None,
    stop: Event | None = None,
    line: Callable[[str], None] | None = None,
) -> str:
    """Run this interpreter's pip with its files in ``folder``; return what it printed. ``overlay`` is seen by builds.

    Raises:
        EnvironmentFailure: about that version of the package.
    """
    if importlib.util.find_spec("pip") is None:
        reason = f"{sys.executable} has no pip: {sys.executable} -m ensurepip"
        raise EnvironmentFailure(package, version, "did not install", reason)
    log, temporary = folder / "pip.log", folder / "tmp"
    log.unlink(missing_ok=True)
    temporary.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    environ |= {"TMPDIR": str(temporary), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if overlay is not None:
        environ["PYTHONPATH"] = prepended(overlay, "PYTHONPATH")
    ended = run_python(
        "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__', alter_sys=True)",
        # The log says what pip's output doesn't: which index it could not reach.
        [*arguments, "--log", str(log)],
        folder / "pip.txt",
        # Without -P a folder of the working directory could pose as a module of pip's.
        flags=["-P"],
        timeout=timeout,
        environ=environ,
        stop=stop,
        line=line,
    )
    if ended.code == 0:
        return ended.output
    details = last_lines(ended.output)
    if ended.code is None:
        last = f"; the last that pip said: {details[-1].strip()}" if details else ""
        raise EnvironmentFailure(package, version, "timed out", f"pip took over {timeout:g} s{last}", details)
    stage, reason = _why(package, version, ended, log.read_text(errors="replace") if log.exists() else "")
    raise EnvironmentFailure(package, version, stage, reason, details)


def last_lines(output: str) -> list[str]:
    """Return the last lines of what was printed, none of them very long."""
    return [line.rstrip()[:1000] for line in output.splitlines() if line.strip()][-DETAILS:]


def prepended(first: Path, variable: str) -> str:
    """Return a list of paths, such as PYTHONPATH, with one before those that it has."""
    there = os.environ.get(variable)
    return f"{first}{os.pathsep}{there}" if there else str(first)


def signal_name(code: int) -> str:
    """Return the name of the signal that a negative exit code stands for."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_UNFETCHED = re.compile(r"Could not fetch URL (\S+): (.*?)(?: - skipping)?$", re.MULTILINE)
_CONNECTION = re.compile(
    r"Max retries exceeded|NewConnectionError|ConnectTimeout|Read timed out|ConnectionReset|IncompleteRead"
    r"|Connection (?:refused|aborted)|name resolution|Name or service not known|Network is unreachable"
    r"|ProxyError|SSLError|HTTP error (?!404)\d|\b(?:Server|Client) Error: (?!Not Found)"
)
_CAUSE = re.compile(
    # Not pip's own kinds of errors, such as "error: metadata-generation-failed".
    r"^[ \t│]*(?!error: [a-z-]+$)((?:[\w.]*(?:Error|Exception|Exit|Interrupt)|(?:fatal )?error): .+)$",
    re.MULTILINE,
)


def _why(package: str, version: str, ended: Ended, log: str) -> tuple[Stage, str]:
    """Return the stage and the reason of pip's failure."""
    output = ended.output
    # Those of a pip that a build ran are indented.
    errors = re.findall(r"^ERROR: (.*)$", output, re.MULTILINE)
    # A 404 is an answer: this index has no such package.
    unreached = [(url, why) for url, why in _UNFETCHED.findall(log) if not re.search(r"\b404 Client Error", why)]
    if any(error.startswith("No matching distribution found for") for error in errors):
        if unreached:
            url, why = unreached[0]
            return "no network", f"the index can't be reached: {_host(url)}: {_short(why)}"
        ignored = re.search(
            r"^WARNING: (The repository located at \S+ is not a trusted [^.]* is being ignored)", output, re.M
        )
        if ignored:
            return "no network", ignored[1]
        return "no such version", _nearest(package, version, output)
    broken = [error for error in errors if _CONNECTION.search(error)]
    if broken:
        return "no network", _short(broken[-1])
    if ended.code is not None and ended.code < 0:
        return "did not install", f"pip died of {signal_name(ended.code)}"
    causes = [cause.strip() for cause in _CAUSE.findall(output)]
    if causes and causes[-1].startswith("pip._vendor.") and _CONNECTION.search(causes[-1]):
        return "no network", _short(causes[-1])
    if causes:
        return "did not install", causes[-1]
    conflict = next((error for error in errors if error.startswith("Cannot install")), None)
    if conflict:
        asked = re.findall(r"\(constraint\) (\S+)", output)
        return "did not install", f"a constraint of pip's configuration forbids it: {asked[-1]}" if asked else conflict
    lines = [one.strip() for one in output.splitlines() if one.strip()]
    return "did not install", (errors or lines or [f"pip ended with exit code {ended.code}"])[-1]


def _nearest(package: str, version: str, output: str) -> str:
    """Return the reason for a version that isn't there, with those that are near."""
    told = re.search(r"\(from versions: (.*?)\)", output)
    found = known(told[1].split(",") if told else [])
    other = re.search(
        r"^ERROR: Ignored the following versions that require a different python version: (.*)$", output, re.M
    )
    asks = dict(re.findall(r"(\S+) Requires-Python ([^;]+)", other[1]) if other else [])
    if version in asks:
        return f"{package} {version} requires Python {asks[version].strip()}"
    python = f"for Python {sys.version_info.major}.{sys.version_info.minor}"
    wanted_of = re.findall(r"^ERROR: No matching distribution found for (\S+)", output, re.MULTILINE)[-1]
    name = re.split(r"[^A-Za-z0-9._-]", wanted_of)[0]
    if not found:
        return f"the index has no release of {name}" + (f" {python}" if asks else "")
    if name != package:
        return f"no release of {name} is one of {wanted_of}; the last one is {found[-1]}"
    try:
        wanted = Version(version)
    except InvalidVersion:
        return f"there is no {package} {version} {python}"
    if not wanted.is_prerelease:
        found = [one for one in found if not one.is_prerelease] or found
    below, above = [one for one in found if one < wanted][-2:], [one for one in found if one > wanted][:2]
    near = [str(one) for one in below + above]
    text = near[0] if len(near) == 1 else f"{', '.join(near[:-1])} and {near[-1]}"
    return f"there is no {package} {version} {python}; the nearest {'is' if len(near) == 1 else 'are'} {text}"


def known(texts: Sequence[str]) -> list[Version]:
    """Return the versions among texts, sorted, each once."""
    found = set()
    for text in texts:
        with contextlib.suppress(InvalidVersion):
            found.add(Version(text.strip()))
    return sorted(found)


def _host(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


def _short(why: str) -> str:
    """Return the innermost cause of urllib3's nested ones."""
    inner = re.findall(
        r"(?:Failed to establish a new connection|NameResolutionError[^:]*|Caused by \w+\([^:]*): ([^'\")]+)", why
    )
    return (inner[-1] if inner else _host(why)).strip()[:300]
