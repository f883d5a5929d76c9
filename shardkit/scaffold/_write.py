"""Writes the package of a backend from the files in ``template``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from shardkit import __version__, _registry
from shardkit._backend import check_name
from shardkit.errors import InputError, PluginError

LONGEST_NAME = 40

FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/test.yml": "test.yml.in",
    "src/{{ module }}/__init__.py": "plugin.py.in",
    "src/{{ module }}/_engine.py": "engine.py.in",
    "src/{{ module }}/_footprint.py": "footprint.py.in",
    "src/{{ module }}/py.typed": None,
    "tests/test_backend.py": "test_backend.py.in",
}
"""The files of a package, each with the template that it is made of; None for an empty one."""


class Written(NamedTuple):
    """The package that was written."""

    name: str
    """The backend's."""
    distribution: str
    """What pip calls it."""
    module: str
    """What Python imports."""
    directory: Path
    files: tuple[str, ...]
    """Within the directory, with slashes."""


def new_backend(name: str, directory: Path | None = None) -> Written:
    """Write the package of a new backend into a directory, ``shardkit-NAME`` in the current one unless said otherwise.

    It is a whole backend, which averages gradients after the window: change its engine to your own, test by test.

    Raises:
        InputError: the name can't be a backend's or is taken, or the directory can't be written or isn't empty.
            Nothing is left behind then.
    """
    distribution, module = _names(name)
    words = {
        "name": name,
        "distribution": distribution,
        "module": module,
        "prefix": "".join(part.capitalize() for part in module.removeprefix("shardkit_").split("_")),
        "shardkit": f"shardkit{_range(__version__)}",
    }
    template = files("shardkit.scaffold") / "template"
    texts = {
        _filled(path, words): "" if source is None else _filled((template / source).read_text("utf-8"), words)
        for path, source in FILES.items()
    }
    directory = Path(distribution) if directory is None else directory
    _write(texts, directory)
    return Written(name, distribution, module, directory, tuple(texts))


def _names(name: str) -> tuple[str, str]:
    """Return the names of the distribution and of the module.

    Raises:
        InputError: the name can't be a backend's, or one of them is taken.
    """
    try:
        check_name(name)
    except PluginError as error:
        raise InputError(str(error)) from None
    if len(name) > LONGEST_NAME:
        raise InputError(f"the name of a backend has at most {LONGEST_NAME} characters, not {len(name)}: {name!r}")
    distribution, module = f"shardkit-{name.replace('_', '-')}", f"shardkit_{name.replace('-', '_')}"
    claimed = _registry.claims().get(name)
    if claimed:
        raise InputError(f"the backend name {name!r} is taken by {claimed[0].origin}: choose another one")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise InputError(f"a distribution {distribution} is installed, version {version}: choose another name")
    if importlib.util.find_spec(module) is not None:
        raise InputError(f"a module {module} is there already: choose another name")
    return distribution, module


def _range(version: str) -> str:
    """Return the versions of shardkit whose hooks a backend that is written today fits (docs/hooks.md)."""
    from packaging.version import Version

    major, minor = (*Version(version).release, 0)[:2]
    return f">=0.{minor},<0.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"{{{{ {word} }}}}", value)
    return text


def _write(texts: dict[str, str], directory: Path) -> None:
    made = not directory.exists()
    try:
        if not made and (not directory.is_dir() or any(directory.iterdir())):
            what = "is not empty" if directory.is_dir() else "is no directory"
            raise InputError(f"{str(directory)!r} {what}: name another place with --directory, or empty it")
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"can't write into {str(directory)!r}: {error.strerror}") from error
    try:
        for path, text in texts.items():
            place = directory / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, "utf-8")
    except OSError as error:
        for place in [directory] if made else list(directory.iterdir()):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        raise InputError(f"can't write into {str(directory)!r}: {error.strerror}") from error
