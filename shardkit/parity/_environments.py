"""Environments that differ from the running one in a few packages only: an overlay that PYTHONPATH puts in front.

An environment is a folder of the cache. It is built beside its place and renamed into it, so that what is there is
whole; who builds or uses one holds a lock that dies with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

from shardkit.errors import InputError
from shardkit.parity import _overlay
from shardkit.parity._pip import EnvironmentFailure, Stage, StoppedError, last_lines, prepended, run_python, signal_name
from shardkit.parity._specs import Spec, Specs, installed_version, pair, parse_specs

__all__ = [
    "Environment",
    "EnvironmentFailure",
    "Imported",
    "Spec",
    "Specs",
    "build",
    "build_all",
    "check_import",
    "pair",
    "parse_specs",
    "stale_locks",
]

Progress = Callable[[str, str], None]
"""Called with an environment's name and what happens to it, from the thread that builds it."""

_FORMAT = 1
_STAMP = "environment.json"


@dataclass(frozen=True)
class Environment:
    """Packages in the versions asked for, over all else that is installed.

    ``installed`` are the versions of what lies in ``overlay``; that is ``None`` where all is as it is installed.
    ``notes`` say which requirement isn't met. ``extensions`` is where torch compiles to. ``seconds`` is what building
    took, ``cached`` whether that was earlier.
    """

    name: str
    specs: Specs
    folder: Path
    overlay: Path | None
    extensions: Path
    installed: dict[str, str]
    notes: tuple[str, ...]
    seconds: float
    cached: bool

    def variables(self) -> dict[str, str]:
        """Return the environment variables that make a child, and its children, run in this environment."""
        found = {"TORCH_EXTENSIONS_DIR": str(self.extensions)}
        if self.overlay is not None:
            found["PYTHONPATH"] = prepended(self.overlay, "PYTHONPATH")
            if (self.overlay / "bin").is_dir():
                found["PATH"] = prepended(self.overlay / "bin", "PATH")
        return found

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the environment while children run in it.

        Removes first the locks that killed children left, unless another run holds the environment too.

        Raises:
            EnvironmentFailure: it was removed from the cache.
        """
        try:
            opened = (self.folder / "run.lock").open("a")
        except OSError as error:
            first = self.specs.packages[0]
            reason = f"{self.folder} is gone from the cache: {error.strerror}"
            raise EnvironmentFailure(first.name, first.version, "did not install", reason) from error
        with opened as file:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for lock in stale_locks(self.extensions):
                    lock.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_SH)
            yield


@dataclass(frozen=True)
class Imported:
    """A module as a fresh process imported it; ``version`` is its ``__version__``, ``distribution`` its package's."""

    module: str
    file: str
    version: str | None
    distribution: str | None


def stale_locks(folder: Path) -> list[Path]:
    """Return the locks under a folder with which torch keeps others from compiling an extension at the same time.

    One that a killed process left is waited on for ever, without a word (``torch.utils.file_baton``).
    """
    return sorted(path for path in folder.rglob("lock") if path.is_file())


def build(
    specs: Specs, *, progress: Progress | None = None, timeout: float = 1200.0, stop: Event | None = None
) -> Environment:
    """Return the environment of these versions: from the cache, or installed now.

    ``timeout`` is for each run of pip. Setting ``stop`` ends the work from another thread.

    Raises:
        EnvironmentFailure: one of the versions can't be had.
        InputError: the cache's path can't be used.
    """
    place = _place(specs)
    tell = partial(progress or _silent, str(specs))
    if (found := _cached(specs, place)) is not None:
        tell("in the cache")
        return found
    begun = time.monotonic()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _build_lock(place, tell, stop):
            if (found := _cached(specs, place)) is not None:
                tell("in the cache")
                return found
            _remove_leftovers(place)
            work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
            try:
                installed = _fill(work, specs, tell, timeout, stop)
                seconds = round(time.monotonic() - begun, 1)
                stamp = {"format": _FORMAT, "specs": [vars(spec) for spec in specs], "installed": installed}
                stamp |= {"seconds": seconds, "python": sys.version}
                _check(work, specs, installed)
                (work / _STAMP).write_text(json.dumps(stamp, indent=1))
                if place.exists():
                    # Damaged; as a leftover it is removed even if that is interrupted.
                    place.rename(Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)) / "damaged")
                work.rename(place)
            finally:
                _remove_leftovers(place)
    except OSError as error:
        first = specs.packages[0]
        reason = f"{error.strerror or error}: {error.filename or place.parent}; $SHARDKIT_CACHE says where else"
        raise EnvironmentFailure(first.name, first.version, "did not install", reason) from error
    found = _cached(specs, place, fresh=True)
    if found is None:
        first = specs.packages[0]
        reason = f"{place} was changed while it was made"
        raise EnvironmentFailure(first.name, first.version, "did not install", reason)
    tell(f"ready after {seconds:.0f} s")
    return found


def build_all(
    sides: Sequence[Specs], *, progress: Progress | None = None, timeout: float = 1200.0
) -> list[Environment | EnvironmentFailure]:
    """Build several environments at once, and return each, or why it can't be had. Ctrl-C ends all of them."""
    stop = Event()

    def one(specs: Specs) -> Environment | EnvironmentFailure:
        try:
            return build(specs, progress=progress, timeout=timeout, stop=stop)
        except EnvironmentFailure as failure:
            return failure

    with ThreadPoolExecutor(max(1, len(sides))) as threads:
        try:
            return [made.result() for made in [threads.submit(one, specs) for specs in sides]]
        except BaseException:
            stop.set()
            raise


def _silent(name: str, text: str) -> None:
    pass


# The place in the cache


def _cache() -> Path:
    own, shared = os.environ.get("SHARDKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    found = Path(own) if own else Path(shared) / "shardkit" if shared else Path.home() / ".cache" / "shardkit"
    found = found.expanduser().absolute()
    if os.pathsep in str(found):
        raise InputError(f"the cache {str(found)!r} can't be in PYTHONPATH, which separates by {os.pathsep!r}")
    return found


def _place(specs: Specs) -> Path:
    """Return where an environment lies; the name tells all that its content depends on."""
    facts: list[Any] = [_FORMAT, sys.version, sysconfig.get_platform(), sysconfig.get_config_var("SOABI")]
    # What is missing beside the packages, and what their extensions are linked to, belongs to this installation.
    facts += [platform.machine(), sys.prefix, installed_version("torch")]
    origins = [(spec, _origin(spec)) for spec in specs]
    facts += [[spec.name, origin or f"=={spec.version}"] for spec, origin in origins]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    readable = "_".join(f"{spec.name}-{(origin or spec.version).split()[0]}" for spec, origin in origins)
    return _cache() / "environments" / f"{re.sub(r'[^A-Za-z0-9._+-]', '-', readable)[:80]}-{digest}"


def _origin(spec: Spec) -> str | None:
    """Return which installed version a package is used in; ``None`` if it goes into the overlay."""
    found = installed_version(spec.name)
    if found is None:
        return None
    told = metadata.distribution(spec.name).read_text("direct_url.json") or ""
    # Of a folder or a repository: what it holds needn't be what was released under its version.
    edited = re.search(r'"(dir_info|vcs_info)"', told) is not None
    if not spec.installed and (edited or not _overlay.satisfies(found, f"=={spec.version}")):
        return None
    return f"{found} {told}" if edited else found


def _asked(specs: Specs) -> list[Spec]:
    """Return what must be installed; torch comes first, since others are compiled against it."""
    return sorted((spec for spec in specs if _origin(spec) is None), key=lambda spec: spec.name != "torch")


def _cached(specs: Specs, place: Path, *, fresh: bool = False) -> Environment | None:
    """Return the environment at its place; ``None`` if it isn't there, isn't whole, or isn't what it would be now."""
    overlay = place / "overlay"
    try:
        stamp = json.loads((place / _STAMP).read_text())
        if stamp["format"] != _FORMAT or not (place / "extensions").is_dir():
            return None
        installed, seconds = dict(stamp["installed"]), float(stamp["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    asked = {spec.name for spec in _asked(specs)}
    if not asked <= installed.keys() or not _overlay.is_whole(overlay, installed):
        return None
    if any(installed_version(name) is not None for name in installed.keys() - asked):
        return None  # a requirement that was missing then is installed by now, and would be hidden
    missing, notes = _overlay.requirements(overlay, installed)
    if missing:
        return None  # and the other way around
    notes += _overlay.hiding(overlay, sorted(installed.keys() - asked))
    used = overlay if installed else None
    return Environment(
        str(specs), specs, place, used, place / "extensions", installed, tuple(notes), seconds, not fresh
    )


@contextlib.contextmanager
def _build_lock(place: Path, tell: Callable[[str], None], stop: Event | None) -> Iterator[None]:
    """Hold the lock of a place; the system takes it from a process that dies."""
    with place.with_name(f"{place.name}.lock").open("a+") as file:
        waits = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    file.seek(0)
                    tell(f"waiting: process {file.read().strip() or '?'} builds it")
                waits = True
                time.sleep(0.05)
            if stop is not None and stop.is_set():
                raise StoppedError
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _remove_leftovers(place: Path) -> None:
    """Remove what killed builders left: of this place, whose lock we hold, and of those that nobody builds now."""
    for path in place.parent.glob(".*"):
        name = path.name[1:].rpartition(".")[0]
        if name == place.name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError), place.with_name(f"{name}.lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


# What is in it


def _fill(work: Path, specs: Specs, tell: Callable[[str], None], timeout: float, stop: Event | None) -> dict[str, str]:
    """Install what is asked for, and what that needs and nobody has; return the versions."""
    (work / "extensions").mkdir()
    install = partial(_overlay.install, work, timeout=timeout, stop=stop, tell=tell)
    asked = _asked(specs)
    for spec in asked:
        tell(f"install {spec.name} {spec.version}")
        install(f"{spec.name}=={spec.version}", spec)
    installed = {spec.name: _overlay.version_in(work / "overlay", spec.name) for spec in asked}
    while missing := _overlay.requirements(work / "overlay", installed)[0]:
        for name, (requirement, owner) in missing.items():
            tell(f"install {requirement}, which {owner} needs")
            of = next((spec for spec in asked if spec.name == owner), asked[0])
            install(str(requirement), of, owner=owner)
            installed[name] = _overlay.version_in(work / "overlay", name)
    for rest in ("tmp", "pip.log", "pip.txt"):
        path = work / rest
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return installed


def _check(work: Path, specs: Specs, installed: dict[str, str]) -> None:
    """Raise unless an overlay is what pip said that it is."""
    if not _overlay.is_whole(work / "overlay", installed):
        first = _asked(specs)[0]
        reason = "pip reported success, but files of it are missing"
        raise EnvironmentFailure(first.name, first.version, "did not install", reason)


# Whether it imports

_IMPORT = """
import importlib, json
from importlib import metadata
result, modules = sys.argv[1], json.loads(sys.argv[2])
found = {"imported": [], "at": None, "error": None}
def write():
    with open(result, "w") as file:
        json.dump(found, file)
for module, package in modules:
    found["at"] = module
    write()
    try:
        made = importlib.import_module(module)
    except BaseException as error:
        text = str(error).strip().splitlines()
        found["error"] = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        write()
        raise
    try:
        distribution = metadata.version(package)
    except metadata.PackageNotFoundError:
        distribution = None
    file = getattr(made, "__file__", None) or next(iter(getattr(made, "__path__", [])), "")
    version = getattr(made, "__version__", None)
    found["imported"].append([module, file, None if version is None else str(version), distribution])
found["at"] = None
write()
# What a library does at exit is not the question.
sys.stdout.flush(); sys.stderr.flush(); os._exit(0)
"""


def check_import(
    environment: Environment,
    modules: Sequence[str] | None = None,
    timeout: float = 120.0,
    *,
    stop: Event | None = None,
) -> dict[str, Imported]:
    """Import modules in a fresh process of an environment; return what was imported, by the module's name.

    Without ``modules``, the one of each package. What a package of the overlay provides must come from there.

    Raises:
        EnvironmentFailure: one raised, ended or killed the process, hung, or came from elsewhere.
    """
    provided = {spec.name: _overlay.modules(environment.overlay, spec.name) for spec in environment.specs}
    package_of = {module: name for name, found in provided.items() for module in found}
    names = [found[0] for found in provided.values() if found] if modules is None else list(modules)
    pairs = [(name, package_of.get(name.partition(".")[0], name.partition(".")[0])) for name in names]
    with tempfile.TemporaryDirectory(prefix="shardkit-") as made, environment.in_use():
        result = Path(made) / "result.json"
        ended = run_python(
            _IMPORT,
            [str(result), json.dumps(pairs)],
            Path(made) / "output.txt",
            timeout=timeout,
            environ={**os.environ, **environment.variables()},
            stop=stop,
        )
        told = json.loads(result.read_text()) if result.exists() else {"imported": [], "at": None, "error": None}
    details = last_lines(ended.output)
    versions = {spec.name: spec.version for spec in environment.specs}
    first = environment.specs.packages[0].name

    def failure(module: str, why: str, *, late: bool = False) -> EnvironmentFailure:
        package = dict(pairs).get(module, first)
        if package not in versions:
            package, why = first, f"{why} (with {environment.name})"
        stage: Stage = "timed out" if late else "did not import"
        return EnvironmentFailure(package, versions[package], stage, why, details)

    if told["error"] is not None:
        # Who leaves by SystemExit has said why before.
        hint = f": {details[-1]}" if told["error"].startswith("SystemExit") and details else ""
        raise failure(told["at"], f"import {told['at']} raised {told['error']}{hint}")
    if ended.code is None:
        locks = stale_locks(environment.extensions)
        cause = f"; it may wait for the build lock {locks[0]}" if locks else ""
        raise failure(told["at"], f"import {told['at'] or first} took over {timeout:g} s{cause}", late=True)
    if ended.code != 0 or told["at"] is not None:
        how = f"died of {signal_name(ended.code)}" if ended.code < 0 else f"ended the process with code {ended.code}"
        raise failure(told["at"], f"import {told['at'] or first} {how}")
    found = {one[0]: Imported(*one) for one in told["imported"]}
    for module, package in pairs:
        file = found[module].file
        inside = environment.overlay is not None and Path(file).is_relative_to(environment.overlay)
        if package in environment.installed and not inside:
            raise failure(module, f"import {module} finds {file or 'nothing on disk'}, not {environment.overlay}")
    return found
