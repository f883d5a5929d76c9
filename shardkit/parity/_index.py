"""Which versions of a package there are, as pip's configured index has them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from threading import Event

from packaging.version import Version

from shardkit.parity._pip import EnvironmentFailure, known, run_pip
from shardkit.parity._specs import check_name


def versions(
    name: str, *, prereleases: bool = False, timeout: float = 120.0, stop: Event | None = None
) -> list[Version]:
    """Return the versions of a package that this Python can install, sorted.

    Raises:
        EnvironmentFailure: there is no such package, or the index can't be reached.
        InputError: that's no package's name.
    """
    name = check_name(name)
    arguments = ["index", "versions", name, *(["--pre"] if prereleases else [])]
    with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
        output = run_pip(arguments, Path(folder), package=name, version="", timeout=timeout, stop=stop)
    told = re.search(r"^Available versions: (.*)$", output, re.MULTILINE)
    if told is None:
        raise EnvironmentFailure(
            name, "", "did not install", "pip index lists no versions: a newer pip may", output.splitlines()
        )
    return [version for version in known(told[1].split(",")) if prereleases or not version.is_prerelease]
