"""DeepSpeed's checkpoints at stages 1 to 3: from the ranks' flat tensors to parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit import Imported, Pieces, Source
from shardkit.errors import CheckpointError
from shardkit_deepspeed._import_common import KNOWN, MODEL, apart, imported, like_torch

_OPTIMIZER = re.compile(r"(?P<kind>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_00_optim_states\.pt")
_MODEL_PART = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_00_model_states\.pt")


def numbered_parts(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the files of the optimizer's and of the model's parts, by rank."""
    return _numbered(folder, _OPTIMIZER), _numbered(folder, _MODEL_PART)


class _Part(NamedTuple):
    """What one rank's file has of the optimizer."""

    path: Path
    content: Mapping[str, Any]
    flats: list[Tensor]
    state: list[Mapping[str, Any]]
    """By number of the flat tensor."""
    groups: list[Mapping[str, Any]]
    numbers: list[list[int]]
    """Which flat tensors belong to each group."""
    dealt_out: bool
    """Whether parameters lie in another order than in the optimizer's groups."""


def sharded(
    source: Source, folder: Path, model: Mapping[str, Any], parts: dict[int, Path], model_parts: dict[int, Path]
) -> Imported:
    stage = 3 if model_parts else 0
    size = int(model.get("dp_world_size") or len(parts))
    kind = next((_OPTIMIZER.match(path.name)["kind"] for path in parts.values()), "")  # type: ignore[index]
    for rank in range(size):
        if rank not in parts:
            raise CheckpointError(
                f"{str(folder)!r} lacks {kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt, the optimizer's part of "
                f"rank {rank} of {size}: it was never finished"
            )
        if stage == 3 and rank not in model_parts:
            raise CheckpointError(
                f"{str(folder)!r} lacks zero_pp_rank_{rank}_mp_rank_00_model_states.pt, the model's part of rank "
                f"{rank} of {size}: it was never finished"
            )
    beyond = sorted(rank for rank in {*parts, *model_parts} if rank >= size)
    if beyond:
        raise CheckpointError(
            f"{str(folder)!r} has files of rank {beyond[0]}, and the model's file is of {size} ranks: they are of "
            "different saves"
        )
    read = [_part(source, parts[rank], stage) for rank in range(size)]
    _check_alike(folder, read)
    names = [list(group.items()) for group in model.get("param_shapes") or ()]
    if len(names) != len(read[0].flats):
        raise CheckpointError(
            f"{str(folder)!r} has the names of {len(names)} flat tensors, and {len(read[0].flats)} of them: its files "
            "are of different saves"
        )
    stage = stage or int(read[0].content.get("zero_stage") or 1)
    places = _by_parameter(folder, names, size) if stage == 3 else _by_group(folder, names, read)
    weights, aliases = _apart_of_parts(model)
    places = {aliases.get(name, name): place for name, place in places.items()}
    weights, frozen = _with_frozen(source, folder, model, model_parts, weights, places, size, stage)
    optimizer = _optimizer(folder, read, places)
    for name, place in places.items():
        master = place.pieces([part.flats[place.flat] for part in read])
        if stage < 3:
            _check_rounded(folder, name, master, weights[name])
        weights[name] = master
    module = model["module"]
    precision = next((value.dtype for name, value in module.items() if name in places), torch.float32)
    scaler = read[0].content.get("loss_scaler")
    dynamic = bool(read[0].content.get("dynamic_loss_scale"))
    return imported(
        model,
        stage,
        dtype="" if precision is torch.float32 else f", in {str(precision).removeprefix('torch.')}",
        weights={name: weights[name] for name in module if name in weights},
        aliases=aliases,
        frozen=frozen,
        optimizer=optimizer,
        scale=float(getattr(scaler, "cur_scale", 0)) or None if dynamic else None,
    )


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            rank = int(match["rank"])
            if rank in found:
                raise CheckpointError(
                    f"{str(folder)!r} has two files of rank {rank}, {found[rank].name!r} and {path.name!r}: they are "
                    "of different saves"
                )
            found[rank] = path
    return found


def _part(source: Source, path: Path, stage: int) -> _Part:
    whole = source.load(path, KNOWN)
    content = whole.get("optimizer_state_dict") if isinstance(whole, Mapping) else None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{str(path)!r} isn't of DeepSpeed: it has no 'optimizer_state_dict'")
    if content.get("ds_zero_partition_groups") is not None:
        raise CheckpointError(f"{str(path)!r} is split over groups of ranks (MiCS or hpZ), which can't be imported")
    inner = content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    flats = content.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(inner, Mapping) or not isinstance(flats, Sequence):
        raise CheckpointError(
            f"{str(path)!r} has the optimizer's state in a form that can't be imported (elastic or universal "
            "checkpointing): save the run without it"
        )
    groups = list(inner["param_groups"])
    if any(group.get("moe") for group in groups):
        raise CheckpointError(f"{str(path)!r} is of a model with experts (MoE), which can't be imported")
    numbers = [list(group["params"]) for group in groups]
    if [number for own in numbers for number in own] != list(range(len(flats))):
        raise CheckpointError(f"{str(path)!r} has {len(flats)} flat tensors, and its groups list others")
    state = [inner["state"].get(number, {}) for number in range(len(flats))]
    config = whole.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    dealt_out = isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))
    return _Part(path, content, list(flats), state, groups, numbers, dealt_out)


def _check_alike(folder: Path, parts: Sequence[_Part]) -> None:
    """Raise unless the ranks' files are of one save."""

    def facts(part: _Part) -> dict[str, Any]:
        counted = part.content.get("partition_count")
        return {
            "ranks": counted[0] if isinstance(counted, list) and counted else counted,
            "stage": part.content.get("zero_stage"),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in part.groups],
            "flat tensors": len(part.flats),
            "steps": [float(entries["step"]) for entries in part.state if "step" in entries],
        }

    first = facts(parts[0])
    if first["ranks"] not in (None, len(parts)):
        raise CheckpointError(
            f"{str(parts[0].path)!r} is of {first['ranks']} ranks, and the model's file of {len(parts)}: they are of "
            "different saves"
        )
    for part in parts[1:]:
        own = facts(part)
        for what, value in first.items():
            if own[what] != value:
                raise CheckpointError(
                    f"{parts[0].path.name!r} and {part.path.name!r} in {str(folder)!r} have other {what}, {value} and "
                    f"{own[what]}: they are of different saves"
                )


class _Place(NamedTuple):
    """Where the elements of a parameter lie."""

    flat: int
    shape: tuple[int, ...]
    runs: list[tuple[int, int, int, int]]
    """Of each: the rank, the first in the rank's flat tensor, the first in the parameter, and how many."""

    def pieces(self, flats: Sequence[Tensor]) -> Pieces:
        """Return the parameter's part of flat tensors, one of each rank."""
        return Pieces(
            self.shape, [(to, flats[rank].detach()[start : start + size]) for rank, start, to, size in self.runs]
        )


def _by_group(folder: Path, names: Sequence[Sequence[tuple[str, Any]]], parts: Sequence[_Part]) -> dict[str, _Place]:
    """Return where stages 1 and 2 put each parameter: each rank has a run of the group's flat tensor."""
    found: dict[str, _Place] = {}
    for number, group in enumerate(names):
        paddings = (parts[0].content.get("param_alignment_paddings") or {number: [0] * len(group)})[number]
        ends = [0]
        for part in parts:
            padding = (part.content.get("group_paddings") or [0] * len(names))[number]
            ends.append(ends[-1] + part.flats[number].numel() + (0 if part is parts[-1] else padding))
        offset = 0
        for (name, shape), padding in zip(group, paddings, strict=True):
            size, runs = torch.Size(shape).numel(), []
            for rank in range(len(parts)):
                start, end = max(offset, ends[rank]), min(offset + size, ends[rank + 1])
                if start < end:
                    runs.append((rank, start - ends[rank], start - offset, end - start))
            found[name] = _Place(number, tuple(shape), runs)
            offset += size + padding
    _check_places(folder, found, parts)
    return found


def _check_places(folder: Path, places: Mapping[str, _Place], parts: Sequence[_Part]) -> None:
    """Raise unless the places are all in their files, and those that DeepSpeed wrote down itself."""
    for name, place in places.items():
        if sum(size for *_, size in place.runs) != torch.Size(place.shape).numel() or any(
            start + size > parts[rank].flats[place.flat].numel() for rank, start, _, size in place.runs
        ):
            raise CheckpointError(
                f"{str(folder)!r} lacks elements of {name!r} {place.shape}: its files are of different saves"
            )
        for rank, part in enumerate(parts):
            told = part.content.get("param_slice_mappings")
            # With round_robin_gradients DeepSpeed writes them down in the order before it deals parameters out.
            if told is None or part.dealt_out:
                continue
            address = told[place.flat].get(name)
            own = [(start, size) for one, start, _, size in place.runs if one == rank]
            if own != ([] if address is None else [(address.start, address.numel)]):
                raise CheckpointError(
                    f"{str(part.path)!r} has {name!r} elsewhere than the model's file says: they are of different saves"
                )


def _by_parameter(folder: Path, names: Sequence[Sequence[tuple[str, Any]]], size: int) -> dict[str, _Place]:
    """Return where stage 3 puts each parameter: each rank has an equal part of it, the last ones padded."""
    found = {}
    for number, group in enumerate(names):
        offset = 0
        for name, shape in group:
            total = torch.Size(shape).numel()
            part = -(-total // size)
            runs = [
                (rank, offset, rank * part, min(part, total - rank * part))
                for rank in range(size)
                if rank * part < total
            ]
            found[name] = _Place(number, tuple(shape), runs)
            offset += part
    return found


def _apart_of_parts(model: Mapping[str, Any]) -> tuple[dict[str, Tensor | Pieces], dict[str, str]]:
    weights, aliases = apart(model["module"])
    told = model.get("shared_params") or {}
    # Told by name, and at stage 3 not to be seen: what lies in the file is empty there.
    aliases = {**aliases, **told}
    return {name: value for name, value in weights.items() if name not in aliases}, aliases


def _with_frozen(
    source: Source,
    folder: Path,
    model: Mapping[str, Any],
    model_parts: Mapping[int, Path],
    weights: dict[str, Tensor | Pieces],
    trained: Mapping[str, _Place],
    size: int,
    stage: int,
) -> tuple[dict[str, Tensor | Pieces], list[str]]:
    """Return the weights with frozen parameters whole, and those parameters' names."""
    frozen = [name for name in weights if name not in trained and name not in set(model.get("buffer_names") or ())]
    if stage < 3:
        return weights, frozen
    shapes = model.get("frozen_param_shapes") or {}
    unknown = [name for name in frozen if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"{str(folder)!r} lacks the frozen parameter {unknown[0]!r}: it was saved with exclude_frozen_parameters"
        )
    if frozen:
        others = [source.load(model_parts[rank], KNOWN) for rank in range(1, size)]
        fragments = [one.get("frozen_param_fragments") or {} for one in (model, *others)]
        for name in frozen:
            shape, runs = tuple(shapes[name]), []
            total, start = torch.Size(shape).numel(), 0
            for rank, own in enumerate(fragments):
                part = own.get(name)
                if part is None:
                    raise CheckpointError(f"{str(model_parts[rank])!r} lacks its part of the frozen {name!r}")
                count = min(part.numel(), total - start)
                runs.append((start, part.reshape(-1)[:count]))
                start += count
            if start != total:
                raise CheckpointError(f"{str(folder)!r} lacks elements of {name!r} {shape}")
            weights[name] = Pieces(shape, [run for run in runs if run[1].numel()] or runs[:1])
    return weights, frozen


def _optimizer(folder: Path, parts: Sequence[_Part], places: Mapping[str, _Place]) -> dict[str, Any]:
    first = parts[0]
    state: dict[str, dict[str, Any]] = {}
    for name, place in places.items():
        number = place.flat
        entries: dict[str, Any] = {}
        for key, value in first.state[number].items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                entries[key] = value
                continue
            held = [_like_flat(part, number, key) for part in parts]
            entries[key] = place.pieces(held)
        state[name] = entries
    groups = []
    for group, numbers in zip(first.groups, first.numbers, strict=True):
        groups.append({**group, "params": [name for name, place in places.items() if place.flat in numbers]})
    return like_torch({"state": {name: entries for name, entries in state.items() if entries}, "param_groups": groups})


def _like_flat(part: _Part, number: int, key: str) -> Tensor:
    """Return an entry of a flat tensor's state that has a number for each of its elements, as all have in stages 1 to 3
    that DeepSpeed computes right."""
    value, size = part.state[number].get(key), part.flats[number].numel()
    padding = (part.content.get("group_paddings") or {number: 0})[number]
    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() in (size, size + padding):
        return value
    raise CheckpointError(
        f"the optimizer in {str(part.path)!r} keeps {key!r} in another shape than its flat tensors, so that nothing "
        "says which parameter it belongs to: it can't be imported"
    )


def _check_rounded(folder: Path, name: str, master: Pieces, weight: Any) -> None:
    """Raise unless a parameter's weights, rounded, are those of the model's file."""
    flat = weight.detach().reshape(-1)
    for start, values in master.runs:
        if not torch.equal(values.to(flat.dtype), flat[start : start + values.numel()]):
            raise CheckpointError(
                f"{str(folder)!r} has other weights of {name!r} in the optimizer's files than in {MODEL!r}: they are "
                "of different saves"
            )
