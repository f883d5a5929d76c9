"""Tiny packages, made on the spot: what pip installs from a folder."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BUILD = """
import glob, os, shutil, sys, time
def build_wheel(folder, settings=None, metadata=None):
    {code}
    found = glob.glob("*.whl")[0]
    shutil.copy(found, folder)
    return found
"""


def wheel(
    folder: Path, name: str, version: str, *, requires: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Path:
    """Make a wheel with one module, which knows its version, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    told = "".join(f"Requires-Dist: {one}\n" for one in requires)
    content = {
        **(files if files is not None else {f"{name}/__init__.py": f"__version__ = {version!r}\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{told}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}")
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return made


def sdist(folder: Path, name: str, version: str, code: str, *, build_requires: Sequence[str] = ()) -> Path:
    """Make a source distribution that runs code, one line, when it is built, and return its path."""
    inner = wheel(folder / "inner", name, version)
    needs = ", ".join(f'"{one}"' for one in build_requires)
    content = {
        "pyproject.toml": f'[build-system]\nrequires = [{needs}]\nbuild-backend = "making"\nbackend-path = ["."]\n',
        "making.py": BUILD.format(code=code),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        inner.name: inner.read_bytes(),
    }
    made = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(made, "w:gz") as archive:
        for path, data in content.items():
            data = data.encode() if isinstance(data, str) else data
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made


def install(made: Path, site: Path) -> None:
    """Install a wheel into a folder, as pip would."""
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
