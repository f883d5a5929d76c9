"""What on a machine helps or harms DeepSpeed, found without importing it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from shardkit import Finding

TESTED = "0.19.8"
CLIPS_BY_DEFAULT = (0, 19, 7)


def diagnose() -> list[Finding]:
    """Return all findings; none of those about an installed DeepSpeed where there is none."""
    environment = dict(os.environ)
    found = build_locks(extensions_folder(environment), time.time(), Path("/proc"))
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return found
    return [version(installed), *found, tools(), local_size(environment)]


def version(installed: str) -> Finding:
    """Say what is known of a version of DeepSpeed."""
    from packaging.version import Version

    release = Version(installed).release
    if release < Version(TESTED).release:
        return Finding(
            "DeepSpeed's version",
            "problem",
            f"DeepSpeed {installed}: up to 0.19.7, stage 3 on the CPU uses parameters before they have all arrived, "
            "and silently computes wrong losses or NaN in about half of the runs",
            f'pip install "deepspeed>={TESTED}"',
        )
    told = f"DeepSpeed {installed}"
    if release >= CLIPS_BY_DEFAULT:
        told += " clips gradients at a norm of 1 where a configuration does not say: shardkit always says"
    return Finding("DeepSpeed's version", "fine", told)


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where torch builds extensions, such as DeepSpeed's own ops."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(cache, "torch_extensions")


def build_locks(folder: Path, now: float, processes: Path) -> list[Finding]:
    """Find locks of builds, and the processes that hold them; a build that was killed leaves a lock for ever."""
    check = "DeepSpeed's build locks"
    locks = sorted(folder.rglob("lock")) if folder.is_dir() else []
    if not locks:
        return [Finding(check, "fine", f"none in {folder}")]
    found = []
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):
            age = _duration(max(0.0, now - lock.stat().st_mtime))
            holders = _holders(lock, processes)
            if holders:
                message = f"{lock} is held for {age} by process {', '.join(holders)}, which builds the op"
                found.append(Finding(check, "note", message, "wait for it to end"))
            else:
                message = f"{lock} is {age} old and no process that can be seen holds it: whatever needs this op waits "
                found.append(Finding(check, "problem", message + "for ever, without a word", f"rm {lock}"))
    return found


def tools() -> Finding:
    """Look for what DeepSpeed's own ops are built with."""
    missing = [name for name, found in {"ninja": shutil.which("ninja"), "a C++ compiler": _compiler()}.items()
               if not found]  # fmt: skip
    if missing:
        return Finding(
            "DeepSpeed's build tools",
            "note",
            f"{' and '.join(missing)} not found: only DeepSpeed's own ops need them, and shardkit uses none",
            "pip install ninja, and g++ of the system's packages, to use those ops yourself",
        )
    return Finding("DeepSpeed's build tools", "fine", "ninja and a C++ compiler are there; shardkit needs neither")


def local_size(environment: Mapping[str, str]) -> Finding:
    """Look for the variable that switches on DeepSpeed's shared-memory op."""
    check = "LOCAL_SIZE"
    if "LOCAL_SIZE" in environment:
        message = (
            f"LOCAL_SIZE={environment['LOCAL_SIZE']} switches on DeepSpeed's shared-memory op in programs that build "
            "it, which leaves 69 MB for each rank in /dev/shm behind"
        )
        return Finding(check, "note", message, "unset LOCAL_SIZE")
    return Finding(check, "fine", "not set")


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _holders(lock: Path, processes: Path) -> list[str]:
    """Return the processes that have the file open, as far as this user may see."""
    found = []
    for opened in processes.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(entry) == os.path.realpath(lock) for entry in opened.iterdir()):
                found.append(opened.parent.name)
    return found


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
