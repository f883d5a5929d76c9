"""A model's weights in a folder of their own, as other programs read them: from a session, or from a checkpoint."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import shardkit
from shardkit.checkpoints._capture import described_model
from shardkit.checkpoints._contents import WEIGHTS, Contents, Held, whole
from shardkit.checkpoints._directory import PARTIAL, naming, resolve, sync_directory
from shardkit.checkpoints._disk import reserve
from shardkit.checkpoints._layout import DTYPES, Layout, Spec, lay_out, memory_of, read_layout
from shardkit.checkpoints._read import Reader
from shardkit.checkpoints._share import Part
from shardkit.checkpoints._training import buffers
from shardkit.checkpoints._write import Writer, together, write_at
from shardkit.errors import CheckpointError, DamageError, InputError

if TYPE_CHECKING:
    from shardkit.checkpoints._training import Training

FILE = "model.safetensors"
CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}
"""What else a model of the transformers library needs, by its name in a manifest."""

_MARK = "shardkit"
"""By which an export is known, in the metadata of its file; ``format`` is what the transformers library asks for."""


def export_session(training: Training, directory: Path, dtype: torch.dtype | None) -> None:
    """Write the weights of a session, each rank what it holds. Collective.

    Raises:
        CheckpointError: the directory isn't empty and no export, or can't be written.
    """
    processes, model = training.processes, training.model
    rank = processes.rank
    facts = described_model(model, list(training.shapes))
    held: dict[str, Held] = {}

    def told() -> dict[str, Any]:
        _check(dtype)
        if getattr(model, "_hf_peft_config_loaded", False):
            raise InputError(
                "the model has adapters, which aren't exported: from_pretrained finds them in files of "
                "their own. full_weights gives what the module holds, and save keeps it"
            )
        for name, start, values, _ in training.engine.weight_shards():
            one = held.setdefault(name, Held(Spec(_as(values.dtype, dtype), training.shapes[name]), []))
            one.runs.append((start, values))
        # Of the ranks' buffers, those that the next step would take.
        for name, value in buffers(model).items() if rank == 0 else ():
            held[name] = whole(value)._replace(spec=Spec(_as(value.dtype, dtype), tuple(value.shape)))
        for name in facts.get("unsaved", ()):
            held.pop(name, None)
        if rank == 0:
            _take(directory)
        return {name: (one.spec, one.extent()) for name, one in held.items()}

    found = together(processes, told)
    specs = {name: spec for report in found for name, (spec, _) in report.items()}
    contents = Contents(
        {"metadata": {FILE: _metadata()}},
        {FILE: held},
        {FILE: specs},
        [{FILE: {name: runs for name, (_, runs) in report.items()}} for report in found],
    )
    partial = directory / f"{PARTIAL}{processes.agree(secrets.token_hex(4))[0]}"
    try:
        Writer(contents, rank).write_files(partial, processes)
        together(processes, lambda: None if rank else _publish(partial, directory, facts, specs))
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)


def export(
    checkpoint: str | Path,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the weights of a checkpoint, or of the last one in a directory, as other programs read them.

    That is ``model.safetensors``, and for a model of the transformers library what ``from_pretrained`` needs beside it.
    Of tied tensors one is written. With ``dtype``, what is of floating point is written in it. A few MiB are held in
    memory, whatever the size. What is read is compared with its checksums first. ``progress`` is called with the bytes
    that were read and those that there are. Not collective. Returns the directory.

    Raises:
        InputError: the dtype is none of floating point.
        DamageError: the checkpoint is damaged.
        CheckpointError: there is none, or the directory isn't empty and no export, or can't be written.
    """
    _check(dtype)
    target = Path(directory)
    with Reader(resolve(Path(checkpoint))) as reader:
        facts = reader.manifest.get("model") or {}
        unsaved = facts.get("unsaved", ())
        saved = {name: spec for name, spec in reader.specs(WEIGHTS).items() if name not in unsaved}
        specs = {name: Spec(_as(spec.dtype, dtype), spec.shape) for name, spec in saved.items()}
        partial = target / f"{PARTIAL}{secrets.token_hex(4)}"
        try:
            _take(target)
            partial.mkdir()
            _copy(reader, partial / FILE, saved, lay_out(specs, _metadata()), progress)
            _publish(partial, target, facts, specs)
        except OSError as error:
            raise CheckpointError(f"can't write {error.filename or str(target)!r}: {error.strerror}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy(
    reader: Reader,
    path: Path,
    saved: Mapping[str, Spec],
    layout: Layout,
    progress: Callable[[int, int], None] | None,
) -> None:
    total, done = sum(spec.numel * spec.itemsize for spec in saved.values()), 0
    with naming(path), path.open("wb") as file:
        file.write(layout.header)
        file.flush()
        reserve(file.fileno(), layout.size)
        for name, spec in saved.items():
            target = layout.specs[name]
            for part in reader.cut(WEIGHTS, Part(name, 0, spec.numel)):
                reader.verify(WEIGHTS, [part])
                piece = torch.empty(part.end - part.start, dtype=target.dtype)
                reader.read_into(WEIGHTS, part, piece)
                write_at(file.fileno(), memory_of(piece), layout.places[name] + part.start * target.itemsize)
                done += piece.numel() * spec.itemsize
                if progress is not None:
                    progress(done, total)
        os.fsync(file.fileno())


def _check(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES and dtype.is_floating_point):
        raise InputError(f"dtype is one of floating point, such as torch.bfloat16, not {dtype!r}")


def _as(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _metadata() -> dict[str, str]:
    return {"format": "pt", _MARK: shardkit.__version__}


def _take(directory: Path) -> None:
    """Make the directory, unless it holds something else than an export."""
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
        found = sorted(path for path in directory.iterdir() if not path.name.startswith(PARTIAL))
        if found and not _is_export(directory):
            raise CheckpointError(
                f"{str(directory)!r} isn't empty, and holds no export: it has {found[0].name!r}. Name another directory"
            )
        for left in directory.glob(f"{PARTIAL}*"):
            # Of an export that was killed.
            shutil.rmtree(left, ignore_errors=True)


def _is_export(directory: Path) -> bool:
    try:
        header = json.loads(read_layout(directory / FILE).header[8:])
    except (OSError, DamageError):
        return False
    return _MARK in header.get("__metadata__", {})


def _publish(partial: Path, directory: Path, facts: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
    """Put the files in their places, each in one step: the weights last."""
    kinds = {spec.dtype for name, spec in specs.items() if spec.dtype.is_floating_point and name in facts["parameters"]}
    widest = max(kinds, key=lambda kind: kind.itemsize, default=None)
    for key, name in CONFIGS.items():
        if key not in facts:
            (directory / name).unlink(missing_ok=True)
            continue
        told = {entry: value for entry, value in facts[key].items() if value is not None}
        if key == "config":
            told["architectures"] = [facts["class"].rpartition(".")[2]]
            if widest is not None:
                told["dtype"] = str(widest).removeprefix("torch.")
        with naming(partial / name), (partial / name).open("w", encoding="utf-8") as file:
            json.dump(told, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        (partial / name).replace(directory / name)
    (partial / FILE).replace(directory / FILE)
    sync_directory(directory)
