"""Checks of the machine: those that concern every backend, and those that each plugin brings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit import _registry
from shardkit._finding import Finding
from shardkit.errors import MissingLibraryError, PluginError

if TYPE_CHECKING:
    from rich.table import Table

TESTED_TORCH = "2.13"
"""The torch that all backends are tested on."""

OLD_SEGMENT_SECONDS = 3600
SHARED_MEMORY = Path("/dev/shm")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def examine() -> list[Finding]:
    """Return what every check found, in the order of the checks; imports neither torch nor a backend's library."""
    environment = dict(os.environ)
    found = [
        torch_version(),
        launcher_variables(environment),
        master_port(environment),
        local_port(),
        host_name(),
        threads(environment, os.cpu_count() or 1),
        cuda_devices(environment),
        shared_memory(SHARED_MEMORY, time.time()),
    ]
    return [*found, *plugins()]


def table(findings: list[Finding]) -> Table:
    """Return the findings as the table that ``shardkit doctor`` prints."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    styles = {"fine": "green", "note": "yellow", "problem": "bold red"}
    printed = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("check", "", "found, and what to do"):
        printed.add_column(column)
    for finding in findings:
        text = Text(finding.message)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", "bold")
        printed.add_row(Text(finding.check), Text(finding.level, styles[finding.level]), text)
    return printed


def plugins() -> list[Finding]:
    """Return what the plugins find; one that can't be loaded, or whose own check fails, is a finding itself."""
    found = []
    for name in _registry.claims():
        check = f"backend {name}"
        try:
            backend = _registry.describe(name)
            own = _registry.diagnose(name)
        except PluginError as error:
            found.append(_told(check, error))
            continue
        except Exception as error:
            message = f"its own check fails with {type(error).__name__}: {error}"
            found.append(Finding(check, "problem", message, "report it to the authors of the plugin"))
            continue
        try:
            _registry.require_library(backend)
            found.append(Finding(check, "fine", "its plugin loads, and its library is there"))
        except MissingLibraryError as error:
            # A library that isn't there is a choice; one that is too old is not.
            missing = backend.library is not None and not _present(backend.library)
            found.append(Finding(check, "note" if missing else "problem", str(error)))
        found += own
    for wrapper in _registry.wrappers():
        check = f"wrapper {wrapper.name}"
        try:
            _registry.load(wrapper)
            found.append(Finding(check, "fine", f"its plugin loads ({wrapper.origin})"))
        except PluginError as error:
            # None is left out without a word: every backend is refused till it is mended.
            found.append(_told(check, error))
    return found


def _told(check: str, error: PluginError) -> Finding:
    message, _, advice = str(error).rpartition("; ")
    return Finding(check, "problem", message or advice, advice if message else "")


def torch_version() -> Finding:
    """Compare torch with what the backends are tested on."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "problem", "torch is not installed", "pip install torch")
    from packaging.version import Version

    told = f"torch {version} on Python {platform.python_version()}"
    if Version(version).release[:2] < Version(TESTED_TORCH).release:
        message = f"{told} is older than {TESTED_TORCH}, which all backends are tested on"
        return Finding("torch", "note", message, f'pip install "torch>={TESTED_TORCH}"')
    return Finding("torch", "fine", told)


def launcher_variables(environment: Mapping[str, str]) -> Finding:
    """Look for variables of a launcher that are set in part, or mislead."""
    check = "launcher's variables"
    present = [name for name in LAUNCHER_VARIABLES if name in environment]
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    decisive = {"RANK", "WORLD_SIZE"} & set(present)
    if decisive and missing:
        return Finding(
            check,
            "problem",
            f"{', '.join(present)} set without {', '.join(missing)}: training would wait for ranks that never come, "
            "or fail",
            f"unset {' '.join(present)}, or start with torchrun, which sets them all",
        )
    if decisive:
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            wrong = "" if 0 <= rank < size else f"RANK={rank} is not below WORLD_SIZE={size}"
        except ValueError:
            wrong = f"RANK={environment['RANK']!r} and WORLD_SIZE={environment['WORLD_SIZE']!r} are whole numbers"
        if wrong:
            return Finding(check, "problem", wrong, "unset them, or start with torchrun")
        message = f"this shell is rank {rank} of {size}: a program started in it joins or waits for the others"
        return Finding(check, "note", message, "unset RANK WORLD_SIZE to train in one process")
    return Finding(check, "fine", "no RANK or WORLD_SIZE: a program without a launcher trains in one process")


def master_port(environment: Mapping[str, str]) -> Finding:
    """Try the port that MASTER_PORT names, where it is set."""
    check = "MASTER_PORT"
    text = environment.get("MASTER_PORT")
    if text is None:
        return Finding(check, "fine", "not set: a free port is found at each launch")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return Finding(check, "problem", f"MASTER_PORT is a port from 1 to 65535, not {text!r}", "unset MASTER_PORT")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(text)))
        except OSError as error:
            message = f"port {text}, set by MASTER_PORT, can't be used: {error.strerror}"
            advice = "unset MASTER_PORT to have a free one found, or end the program that holds the port"
            return Finding(check, "problem", message, advice)
    return Finding(check, "fine", f"port {text} is free")


def local_port() -> Finding:
    """Try to listen on the local interface and to connect to it, as ranks do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5):
                return Finding("local ports", "fine", f"127.0.0.1 takes connections, tried on port {address[1]}")
    except OSError as error:
        message = f"a process can't connect to another on 127.0.0.1: {error}"
        return Finding(
            "local ports", "problem", message, "bring up the loopback interface, or allow it in the firewall"
        )


def host_name() -> Finding:
    """Resolve this machine's name: gloo and NCCL find their interface by it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "host name",
            "problem",
            f"the name of this machine, {name!r}, does not resolve ({error}): gloo may fail or wait for long",
            f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo for ranks on one machine",
        )
    return Finding("host name", "fine", f"{name} is {address}")


def threads(environment: Mapping[str, str], cores: int) -> Finding:
    """Look for a number of threads per rank that the cores can't carry."""
    text = environment.get("OMP_NUM_THREADS")
    if text is None:
        message = f"OMP_NUM_THREADS is not set: torchrun and shardkit.launch give each rank one thread; {cores} cores"
        return Finding("threads", "fine", message)
    if not text.isdecimal() or int(text) < 1:
        advice = "unset OMP_NUM_THREADS"
        return Finding("threads", "problem", f"OMP_NUM_THREADS is a whole number above 0, not {text!r}", advice)
    if int(text) * 2 > cores and int(text) > 1:
        message = f"OMP_NUM_THREADS={text} on {cores} cores: two ranks on the CPU would wait for each other's threads"
        return Finding("threads", "note", message, f"set OMP_NUM_THREADS to at most {max(1, cores // 2)} for two ranks")
    return Finding("threads", "fine", f"OMP_NUM_THREADS={text} on {cores} cores")


def cuda_devices(environment: Mapping[str, str]) -> Finding:
    """Count the GPUs of the driver, and see whether this shell hides them."""
    check = "GPUs"
    present = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not present:
        return Finding(check, "fine", "none: training runs on the CPU, over gloo")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        message = f"the machine has {len(present)}, but CUDA_VISIBLE_DEVICES={visible!r} hides them all"
        return Finding(check, "note", message, "unset CUDA_VISIBLE_DEVICES to train on them")
    if "+cpu" in importlib.metadata.version("torch"):
        message = f"the machine has {len(present)}, but this torch is built for the CPU"
        return Finding(check, "note", message, "install a build of torch for CUDA")
    shown = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    return Finding(check, "fine", f"{len(present)} in this machine{shown}")


def shared_memory(folder: Path, now: float) -> Finding:
    """Look for segments that ended programs left in shared memory, which fill it until data loaders and ops fail."""
    check = "shared memory"
    if not folder.is_dir():
        return Finding(check, "fine", f"there is no {folder}")
    old, size = [], 0
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.is_file() and now - state.st_mtime > OLD_SEGMENT_SECONDS and state.st_uid == os.getuid():
                old.append(path)
                size += state.st_size
    usage = shutil.disk_usage(folder)
    told = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free in {folder}"
    if not old:
        return Finding(check, "fine", told)
    message = f"{told}; {len(old)} files of yours of {size / 2**20:.0f} MiB are older than an hour, {old[0].name} first"
    advice = f"remove those that no running program uses: fuser {folder}/*"
    return Finding(check, "problem" if usage.free < usage.total / 10 else "note", message, advice)


def _present(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
