"""What on a machine helps or harms FairScale, found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from shardkit import Finding

TESTED = "0.4.13"


def diagnose() -> list[Finding]:
    """Return what is known of the installed FairScale; nothing where there is none."""
    try:
        installed = importlib.metadata.version("fairscale")
    except importlib.metadata.PackageNotFoundError:
        return []
    return [version(installed, pygit2=importlib.util.find_spec("pygit2") is not None)]


def version(installed: str, *, pygit2: bool) -> Finding:
    """Say what is known of a version of FairScale; ``pygit2`` tells whether that module is there."""
    from packaging.version import Version

    check = "FairScale's version"
    if Version(installed).release == (0, 4, 7) and not pygit2:
        message = "FairScale 0.4.7 without pygit2 exits the interpreter when it is imported"
        return Finding(check, "problem", message, f'pip install "fairscale>={TESTED}"')
    if Version(installed).release < Version(TESTED).release:
        message = f"FairScale {installed} is older than {TESTED}, which shardkit is tested on"
        return Finding(check, "problem", message, f'pip install "fairscale>={TESTED}"')
    return Finding(check, "fine", f"FairScale {installed}, the last release; it is not developed further")
