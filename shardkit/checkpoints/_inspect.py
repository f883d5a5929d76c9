"""What a checkpoint holds, without a model to load it into, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.checkpoints._contents import WEIGHTS
from shardkit.checkpoints._directory import resolve
from shardkit.checkpoints._manifest import read_manifest
from shardkit.checkpoints._read import Reader
from shardkit.errors import DamageError


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint; ``bytes`` is its size."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds. What its manifest doesn't say, or can't since it is damaged, is None or empty."""

    path: Path
    damage: str | None = None
    """What is wrong with which file; None if nothing is, as far as was looked."""
    verified: bool = False
    """Whether every byte was read and compared with its checksum."""
    step: int | None = None
    """Steps that moved the weights."""
    skipped_steps: int | None = None
    saved: str | None = None
    """When, in ISO 8601."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Backend, options, precision and accumulation of the session that wrote it."""
    world_size: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Of shardkit, Python, torch and the backend's library."""
    model: str | None = None
    """The model's class."""
    parameters: int | None = None
    """The elements of all parameters, tied ones once."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The further names of tied parameters, each with the one that the tensor goes by."""
    optimizer: str | None = None
    """The optimizer's class."""
    groups: tuple[dict[str, Any], ...] = ()
    """The settings of the optimizer's groups, each with how many parameters it has."""
    objects: tuple[str, ...] = ()
    """The names of what was handed to ``save`` as ``objects``."""
    state: tuple[str, ...] = ()
    """The names in the mapping that was handed to ``save`` as ``state``."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The bytes of each file."""
    tensors: tuple[SavedTensor, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(self.sizes.values())


def inspect(path: str | Path, *, verify: bool = True, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Return what a checkpoint holds, or the last one in a directory, and whether it is whole. Not collective.

    With ``verify`` all of it is read and compared with its checksums; ``progress`` is then called with the bytes that
    were compared and those that there are. Damage is told in what is returned, and not raised.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another format.
    """
    place = resolve(Path(path))
    try:
        manifest = read_manifest(place)
    except DamageError as error:
        return Inspection(place, str(error))
    try:
        with Reader(place) as reader:
            damage, verified = None, False
            if verify:
                try:
                    _verify(reader, progress)
                    verified = True
                except DamageError as error:
                    damage = str(error)
            return Inspection(
                place,
                damage,
                verified,
                parameters=_parameters(reader),
                tensors=_tensors(reader),
                **_facts(manifest),
            )
    except DamageError as error:
        return Inspection(place, str(error), **_facts(manifest))


def _verify(reader: Reader, progress: Callable[[int, int], None] | None) -> None:
    total = sum(spec.numel * spec.itemsize for file in reader.manifest["files"] for spec in reader.specs(file).values())
    done = 0
    for size in reader.verify_all():
        done += size
        if progress is not None:
            progress(done, total)


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = manifest.get("model") or {}, manifest.get("optimizer") or {}
    by_rank = {key for rank in manifest.get("ranks") or () for key in rank.get("differing") or ()}
    names: dict[str, set[str]] = {kind: set(manifest.get(kind) or ()) for kind in ("objects", "state")}
    for key in by_rank:
        kind, _, name = key.partition("/")
        names.setdefault(kind, set()).add(name)
    return {
        **{key: manifest.get(key) for key in ("step", "skipped_steps", "saved", "world_size")},
        **{key: dict(manifest.get(key) or {}) for key in ("strategy", "versions")},
        "model": model.get("class"),
        "aliases": dict(model.get("aliases") or {}),
        "optimizer": optimizer.get("class"),
        "groups": tuple(
            {"parameters": len(group["parameters"]), **_readable(group["settings"])}
            for group in optimizer.get("groups") or ()
        ),
        "objects": tuple(sorted(names["objects"])),
        "state": tuple(sorted(names["state"])),
        "sizes": {file: facts["size"] for file, facts in manifest["files"].items()},
    }


def _parameters(reader: Reader) -> int | None:
    names = (reader.manifest.get("model") or {}).get("parameters")
    specs = reader.specs(WEIGHTS)
    return None if names is None else sum(specs[name].numel for name in names)


def _tensors(reader: Reader) -> tuple[SavedTensor, ...]:
    return tuple(
        SavedTensor(name, file, str(spec.dtype).removeprefix("torch."), spec.shape, spec.numel * spec.itemsize)
        for file in reader.manifest["files"]
        for name, spec in reader.specs(file).items()
    )


def _readable(value: Any) -> Any:
    """Return an encoded value without what it says of its kind."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        return _readable(next(iter(value.values())))
    return {key: _readable(item) for key, item in value.items()}
