"""DeepSpeed's checkpoints by parameter name, read without DeepSpeed.

``engine.save_checkpoint`` writes a folder for each tag. Stage 0 writes one file of state dicts. Stages 1 and 2 write
the weights whole, and for each rank a file with its part of each group's flat tensor. At stage 3 each rank has its part
of every parameter, and of frozen ones in its file of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkit import Imported, Source
from shardkit.errors import CheckpointError
from shardkit_deepspeed._import_common import KNOWN, MODEL, imported
from shardkit_deepspeed._import_parts import numbered_parts, sharded
from shardkit_deepspeed._import_whole import unsharded


def read(source: Source) -> Imported | None:
    """Return what a folder of DeepSpeed's holds; None if it is no such folder.

    Raises:
        CheckpointError: it isn't whole, or of a kind that can't be read.
    """
    folder = _tag(source.path)
    if folder is None:
        return None
    try:
        return _read(source, folder)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{str(folder)!r} isn't as DeepSpeed writes it: {type(error).__name__}: {error}"
        ) from error


def _read(source: Source, folder: Path) -> Imported:
    _refuse(folder)
    parts, model_parts = numbered_parts(folder)
    model_file = model_parts.get(0) if model_parts else folder / MODEL
    if model_file is None or not model_file.is_file():
        wanted = "zero_pp_rank_0_mp_rank_00_model_states.pt" if model_parts else MODEL
        raise CheckpointError(f"{str(folder)!r} lacks {wanted}, which has the model: it was never finished")
    model = source.load(model_file, KNOWN)
    if not isinstance(model, Mapping) or not isinstance(model.get("module"), Mapping):
        raise CheckpointError(f"{str(model_file)!r} isn't of DeepSpeed: it has no 'module'")
    _check_plain(folder, model)
    if not parts and model.get("param_shapes") is None:
        return imported(model, 0, **unsharded(model, model_file))
    return sharded(source, folder, model, parts, model_parts)


def _tag(path: Path) -> Path | None:
    """Return the folder of a tag that a path stands for; None if it has nothing of DeepSpeed's."""
    if not path.is_dir():
        return None
    latest = path / "latest"
    if latest.is_file() and not any(path.glob("*_states.pt")):
        tag = latest.read_text(errors="replace").strip()
        tags = sorted(one.name for one in path.iterdir() if one.is_dir() and any(one.glob("*_states.pt")))
        if not tag or Path(tag).name != tag or not (path / tag).is_dir():
            held = f"it has {', '.join(map(repr, tags))}" if tags else "it has none"
            raise CheckpointError(
                f"{str(latest)!r} names the tag {tag!r}, and there is no such folder beside it: {held}"
            )
        return path / tag
    if (path / "latest_universal").is_file() or (path / "zero").is_dir():
        _refuse(path)
    return path if any(path.glob("*_states.pt")) else None


def _refuse(folder: Path) -> None:
    names = [one.name for one in folder.iterdir()]
    reasons = {
        r"zero$|.*universal": "a universal checkpoint: import the one that it was made from",
        r".*expert_\d+.*_states\.pt": "of a model with experts (MoE)",
        r"layer_\d+.*_states\.pt": "of a pipeline of layers",
        r".*mp_rank_0*[1-9]\d*_.*_states\.pt": "of a model that was split over ranks (model parallelism)",
        r".*\.distcp": "written by a checkpoint engine of its own",
    }
    for pattern, what in reasons.items():
        found = next((name for name in names if re.match(pattern, name)), None)
        if found is not None:
            raise CheckpointError(f"{str(folder)!r} is {what}, as {found!r} shows, which can't be imported")


def _check_plain(folder: Path, model: Mapping[str, Any]) -> None:
    dims = model.get("checkpoint_parallel_dimensions") or {}
    sizes = (model.get("mp_world_size") or 1, dims.get("pp_degree") or 1, dims.get("tp_degree") or 1)
    if any(size != 1 for size in sizes):
        raise CheckpointError(f"{str(folder)!r} is of a model that was split over ranks, which can't be imported")
    if model.get("num_experts") or model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise CheckpointError(f"{str(folder)!r} is of a model with experts (MoE), which can't be imported")
