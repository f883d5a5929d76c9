"""The manifest of a checkpoint: one JSON file with its own checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

import shardkit
from shardkit.errors import CheckpointError, DamageError

MANIFEST = "checkpoint.json"
FORMAT = 2


def checksum(data: bytes | memoryview) -> str:
    """Return XXH3 of 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with its format and its own checksum."""
    content = {"format": FORMAT, **content}
    return {**content, "checksum": checksum(_canonical(content))}


def read_manifest(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        DamageError: it can't be read, or is damaged.
        CheckpointError: it is of another format.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        raise DamageError(f"can't read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise DamageError(f"{str(file)!r} is damaged: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(found, int):
        raise DamageError(f"{str(file)!r} is damaged: it says no format")
    if verify and found == FORMAT:
        content = {key: value for key, value in manifest.items() if key != "checksum"}
        if checksum(_canonical(content)) != manifest.get("checksum"):
            raise DamageError(f"{str(file)!r} is damaged: its checksum doesn't fit what it holds")
    if found > FORMAT:
        raise CheckpointError(
            f"{str(file)!r} is of format {found}, and shardkit {shardkit.__version__} reads up to {FORMAT}: it needs a "
            "newer shardkit"
        )
    if found < FORMAT:
        raise CheckpointError(
            f"{str(file)!r} is of format {found}, which only the version of shardkit that wrote it can read"
        )
    assert isinstance(manifest, dict)
    return manifest


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
