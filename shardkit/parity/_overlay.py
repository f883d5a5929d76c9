"""The folder of packages that lies in front of what is installed."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from pathlib import Path
from threading import Event

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from shardkit.parity._pip import EnvironmentFailure, run_pip
from shardkit.parity._specs import Spec, installed_version

_TOLD = (
    "Collecting ",
    "Downloading ",
    "Using cached ",
    "Preparing ",
    "Building wheel",
    "Installing collected",
    "WARNING: Retrying",
)


def install(
    work: Path,
    requirement: str,
    of: Spec,
    *,
    timeout: float,
    stop: Event | None,
    tell: Callable[[str], None],
    owner: str | None = None,
) -> None:
    """Install one requirement, and nothing that it requires, into ``work / "overlay"``.

    ``owner`` is the package that needs it, where it wasn't asked for itself.

    Raises:
        EnvironmentFailure: about the package that was asked for.
    """
    overlay, fresh = work / "overlay", work / "fresh"

    def line(text: str) -> None:
        if text.strip().startswith(_TOLD):
            tell(text.strip()[:200])

    def attempt(*how: str) -> None:
        # pip skips a folder that is there already, such as bin or one of a namespace: each run has its own target.
        shutil.rmtree(fresh, ignore_errors=True)
        run_pip(
            # Compiled, the files would tell tracebacks of the place where they were built.
            [
                "install",
                "--target",
                str(fresh),
                "--no-deps",
                "--no-compile",
                "-v",
                "--progress-bar=off",
                *how,
                requirement,
            ],
            work,
            package=of.name,
            version=of.version,
            timeout=timeout,
            overlay=overlay,
            stop=stop,
            line=line,
        )

    try:
        try:
            attempt("--no-build-isolation")
        except EnvironmentFailure as first:
            if first.stage != "did not install" or not first.details:
                raise
            tell(f"once more, with what it asks for to build: {first.reason}")
            try:
                attempt()
            except EnvironmentFailure as second:
                details = [*first.details, "once more, with build isolation:", *second.details]
                raise EnvironmentFailure(of.name, of.version, first.stage, first.reason, details) from None
    except EnvironmentFailure as failure:
        if owner is None:
            raise
        stage = "did not install" if failure.stage == "no such version" else failure.stage
        reason = f"{owner} needs {requirement}, which isn't installed: {failure.reason}"
        raise EnvironmentFailure(of.name, of.version, stage, reason, failure.details) from None
    if not distributions(fresh):
        raise EnvironmentFailure(of.name, of.version, "did not install", f"pip installed nothing for {requirement}")
    _merge(fresh, overlay)
    shutil.rmtree(fresh, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move a folder's content into another; what is there stays."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        there = target / path.name
        if not there.exists():
            path.rename(there)
        elif path.is_dir() and there.is_dir():
            _merge(path, there)


def distributions(overlay: Path) -> dict[str, metadata.Distribution]:
    """Return what is in an overlay, by normalized name."""
    found = {}
    for one in metadata.distributions(path=[str(overlay)]):
        name = one.metadata["Name"]
        if name:
            found[str(canonicalize_name(name))] = one
    return found


def version_in(overlay: Path, name: str) -> str:
    """Return the version of a package in an overlay; empty if it isn't there."""
    found = distributions(overlay).get(name)
    return "" if found is None else found.version


def is_whole(overlay: Path, installed: dict[str, str]) -> bool:
    """Return whether an overlay holds just these versions, with all their files, in the sizes that they had."""
    there = distributions(overlay) if installed else {}
    if {name: one.version for name, one in there.items()} != installed:
        return False
    return all(_has_its_files(overlay, one) for one in there.values())


def _has_its_files(overlay: Path, distribution: metadata.Distribution) -> bool:
    files = distribution.files
    if files is None:
        return False
    for file in files:
        # Scripts lie elsewhere than a target's list says, and a list doesn't hold its own size.
        if file.parts[0] == ".." or file.suffix == ".pyc":
            continue
        try:
            size = os.stat(overlay / file).st_size
        except OSError:
            return False
        if file.size is not None and size != file.size:
            return False
    return True


def satisfies(version: str, specifier: str | SpecifierSet) -> bool:
    """Return whether a version is one of those; one that can't be read is."""
    try:
        return SpecifierSet(str(specifier)).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def requirements(overlay: Path, installed: Collection[str]) -> tuple[dict[str, tuple[Requirement, str]], list[str]]:
    """Return what the overlay's packages require and nobody has, by name with who requires it; and notes.

    A note tells of a requirement that is installed in another version.
    """
    missing: dict[str, tuple[Requirement, str]] = {}
    notes: list[str] = []
    there = distributions(overlay) if installed else {}
    environment = {name: str(value) for name, value in default_environment().items()}
    pending = [(name, "") for name in sorted(there)]
    seen = set(pending)
    while pending:
        owner, extra = pending.pop()
        for text in there[owner].requires or ():
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                notes.append(f"{owner} {there[owner].version} asks for {text!r}, which can't be read")
                continue
            if wanted.marker is not None and not wanted.marker.evaluate(environment | {"extra": extra}):
                continue
            if extra and wanted.marker is None:
                continue  # told without the extra
            name = str(canonicalize_name(wanted.name))
            # What comes from the overlay is asked with its extras.
            further = {(name, one) for one in wanted.extras} - seen if name in there else set()
            seen |= further
            pending += sorted(further)
            wanted.marker = None
            found = there[name].version if name in there else installed_version(name)
            if found is None:
                missing.setdefault(name, (wanted, owner))
            elif not satisfies(found, wanted.specifier):
                note = f"{owner} {there[owner].version} asks for {wanted}; {found} is installed"
                notes += [note] if note not in notes else []
    return missing, sorted(notes)


def hiding(overlay: Path, names: Iterable[str]) -> list[str]:
    """Return a note for each installed module that one of these packages of the overlay hides by the way."""
    notes = []
    for name in names:
        for module in modules(overlay, name):
            spec = importlib.machinery.PathFinder.find_spec(module)
            # Without an origin it is a namespace, which both can be in.
            if spec is not None and spec.origin is not None:
                notes.append(f"{name}, which is needed, has a module {module!r} that hides the installed {spec.origin}")
    return notes


def modules(overlay: Path | None, name: str) -> list[str]:
    """Return the modules that a package provides, the one of its own name first."""
    found = distributions(overlay).get(name) if overlay is not None else None
    if found is None:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return []
    tops = set((found.read_text("top_level.txt") or "").split())
    if not tops:
        for file in found.files or ():
            root = file.parts[0]
            if len(file.parts) == 1 and file.suffix in (".py", ".so"):
                tops.add(root.partition(".")[0])
            elif len(file.parts) > 1 and root.isidentifier():
                tops.add(root)
    own = name.replace("-", "_")
    public = sorted(top for top in tops if not top.startswith("_") and top.isidentifier())
    # What is installed in place, from a folder, lists no files.
    return sorted(public, key=lambda top: (canonicalize_name(top) != name, top != own, top)) or [own]
