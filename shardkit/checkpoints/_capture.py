"""From a session to the contents of a checkpoint."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import shardkit
from shardkit._random import get_random_state
from shardkit.checkpoints._contents import OPTIMIZER, RANKS, STATE, WEIGHTS, Contents, Encoded, Held, encoded, whole
from shardkit.checkpoints._layout import Spec
from shardkit.checkpoints._share import Run
from shardkit.checkpoints._training import (
    Training,
    aliases,
    attributes,
    buffers,
    extra_states,
    names_of,
    settings,
)
from shardkit.errors import CheckpointError, MismatchError

if TYPE_CHECKING:
    from shardkit._engine import Engine


def capture(
    training: Training,
    counters: Mapping[str, Any],
    windows: Mapping[str, Any] | None,
    objects: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Contents:
    """Return what a checkpoint of this session holds. Collective: one exchange, of names and sizes.

    Raises:
        CheckpointError: it can't hold something that it was given, on every rank.
    """
    report, failure = None, None
    try:
        report = _Report(training, windows, objects, state)
    except Exception as error:
        failure = error
    told: list[dict[str, Any]] = training.processes.agree(None if report is None else report.told(), failure)
    assert report is not None
    return report.contents(training, counters, told)


class _Report:
    """What this rank has, and tells the others of."""

    def __init__(
        self,
        training: Training,
        windows: Mapping[str, Any] | None,
        objects: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        engine, model = training.engine, training.model
        self._rank = training.processes.rank
        self.weights: dict[str, Held] = {}
        for shard in engine.weight_shards():
            held = self.weights.setdefault(shard.name, Held(training.spec(shard.name, shard.values), []))
            held.runs.append((shard.start, shard.values))
        if self._rank == 0:
            # A forward since the last step leaves its own values on each rank, and the next step takes rank 0's.
            self.weights |= {name: whole(value) for name, value in buffers(model).items()}
        self.state: dict[str, dict[str, list[tuple[int, Tensor, bool]]]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.pieces: dict[str, Tensor] = {}
        self._read_optimizer(engine)
        self.common: dict[str, Encoded] = {}
        for key, value in state.items():
            self.common[f"state/{key}"] = encoded(value, f"state/{_escaped(key)}")
        for key, held_object in objects.items():
            self.common[f"objects/{key}"] = encoded(held_object.state_dict(), f"objects/{_escaped(key)}")
        for name, part in extra_states(model):
            self.common[f"extra/{name}"] = encoded(part.get_extra_state(), f"extra/{_escaped(name)}")
        optimizer = engine.optimizer
        if optimizer is not None:
            self.common["attributes"] = encoded(attributes(optimizer), "attributes")
            groups = [settings(group) for group in optimizer.param_groups]
            self.common["groups"] = encoded(groups, "groups")
        place = f"rank-{self._rank}"
        self.own = encoded(
            {"random": get_random_state(training.device), "windows": windows, "engine": engine.state_dict()}, place
        )

    def _read_optimizer(self, engine: Engine) -> None:
        optimizer = engine.stepper
        if optimizer is None:
            return
        for shard in engine.state_shards():
            for key, value in optimizer.state.get(shard.values, {}).items():
                if not isinstance(key, str):
                    raise CheckpointError(f"the optimizer's state of {shard.name!r} has the key {key!r}, not a string")
                if isinstance(value, Tensor):
                    # A count of steps is one number, also of a parameter of one element.
                    per_element = value.shape == shard.values.shape and key != "step"
                    held = self.state.setdefault(shard.name, {}).setdefault(key, [])
                    held.append((shard.start, value, per_element))
                else:
                    found = encoded(value, f"{shard.name}/{key}")
                    self.pieces.update(found.tensors)
                    self.values.setdefault(shard.name, {})[key] = found.value

    def told(self) -> dict[str, Any]:
        """Return what the other ranks must know: sizes and names, no elements."""
        return {
            "weights": {name: (held.spec, held.extent()) for name, held in self.weights.items()},
            "state": {
                name: {
                    key: [
                        (value.dtype, tuple(value.shape), start, value.numel(), per_element)
                        for start, value, per_element in runs
                    ]
                    for key, runs in entries.items()
                }
                for name, entries in self.state.items()
            },
            "values": self.values,
            "pieces": {name: Spec(value.dtype, tuple(value.shape)) for name, value in self.pieces.items()},
            "common": {
                key: (
                    found.digest,
                    found.value,
                    {name: Spec(v.dtype, tuple(v.shape)) for name, v in found.tensors.items()},
                )
                for key, found in self.common.items()
            },
            "own": (self.own.value, {name: Spec(v.dtype, tuple(v.shape)) for name, v in self.own.tensors.items()}),
        }

    def contents(self, training: Training, counters: Mapping[str, Any], told: list[dict[str, Any]]) -> Contents:
        """Return the contents, once all ranks have told what they have."""
        files = _Files(len(told))
        for rank, report in enumerate(told):
            for name, (spec, runs) in report["weights"].items():
                files.note(WEIGHTS, name, spec, rank, runs)
        for name, held in self.weights.items():
            files.hold(WEIGHTS, name, held)
        state = self._state(training, told, files)
        common, by_rank = self._common(told, files)
        ranks = []
        for rank, report in enumerate(told):
            value, specs = report["own"]
            for name, spec in specs.items():
                files.note(RANKS, name, spec, rank, [(0, spec.numel)])
            ranks.append({**value, "differing": by_rank[rank]})
        for name, tensor in self.own.tensors.items():
            files.hold(RANKS, name, whole(tensor))
        described = manifest(
            {**_origin(training), **counters},
            model=described_model(training.model, list(training.shapes)),
            optimizer=_optimizer(training, state, common),
            objects={key.removeprefix("objects/"): value for key, value in common.items() if key[:8] == "objects/"},
            state={key.removeprefix("state/"): value for key, value in common.items() if key[:6] == "state/"},
            extra={key.removeprefix("extra/"): value for key, value in common.items() if key[:6] == "extra/"},
            ranks=ranks,
        )
        return Contents(described, files.own, files.specs, files.held)

    def _state(self, training: Training, told: list[dict[str, Any]], files: _Files) -> dict[str, dict[str, Any]]:
        """Put the optimizer's state into its file, and return it by parameter and key."""
        found: dict[str, dict[str, Any]] = {}
        everything: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        for rank, report in enumerate(told):
            for name, entries in report["state"].items():
                for key, runs in entries.items():
                    everything.setdefault((name, key), []).extend((rank, run) for run in runs)
        for (name, key), runs in everything.items():
            place = f"{name}/{key}"
            found.setdefault(name, {})[key] = {"$tensor": place}
            mine = self.state.get(name, {}).get(key, [])
            if all(per_element for _, (*_, per_element) in runs):
                spec = Spec(runs[0][1][0], training.shapes[name])
                for rank, (_, _, start, size, _) in runs:
                    files.note(OPTIMIZER, place, spec, rank, [(start, start + size)])
                if mine:
                    files.hold(OPTIMIZER, place, Held(spec, [(start, value) for start, value, _ in mine]))
            else:
                spec = Spec(runs[0][1][0], runs[0][1][1])
                for rank in sorted({rank for rank, _ in runs}):
                    files.note(OPTIMIZER, place, spec, rank, [(0, spec.numel)])
                if mine:
                    files.hold(OPTIMIZER, place, whole(mine[0][1]))
        for rank, report in enumerate(told):
            for name, values in report["values"].items():
                found.setdefault(name, {}).update(values)
            for name, spec in report["pieces"].items():
                files.note(OPTIMIZER, name, spec, rank, [(0, spec.numel)])
        for name, value in self.pieces.items():
            files.hold(OPTIMIZER, name, whole(value))
        return found

    def _common(self, told: list[dict[str, Any]], files: _Files) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return those values that are the same on all ranks, and by rank those that aren't."""
        common: dict[str, Any] = {}
        differing: list[dict[str, Any]] = [{} for _ in told]
        for key in {key: None for report in told for key in report["common"]}:
            found = [report["common"].get(key) for report in told]
            if any(one is None for one in found):
                lacking = [str(rank) for rank, one in enumerate(found) if one is None]
                raise CheckpointError(f"rank {', '.join(lacking)} brought no {key!r}, and other ranks did")
            same = all(digest == found[0][0] for digest, *_ in found)
            if not same and key in ("groups", "attributes"):
                raise MismatchError(f"the ranks have different {key} of the optimizer: set them alike on every rank")
            for rank, (_, value, specs) in enumerate(found):
                for name, spec in specs.items():
                    place = name if same else f"rank-{rank}/{name}"
                    files.note(STATE if same else RANKS, place, spec, rank, [(0, spec.numel)])
                if same:
                    common[key] = value
                else:
                    differing[rank][key] = _renamed(value, f"rank-{rank}/")
            for name, tensor in self.common[key].tensors.items():
                place = name if same else f"rank-{self._rank}/{name}"
                files.hold(STATE if same else RANKS, place, whole(tensor))
        return common, differing


class _Files:
    """The tensors of all files, who holds what of them, and what this rank does."""

    def __init__(self, world_size: int) -> None:
        self.specs: dict[str, dict[str, Spec]] = {WEIGHTS: {}, OPTIMIZER: {}, STATE: {}, RANKS: {}}
        self.held: list[dict[str, dict[str, list[Run]]]] = [
            {file: {} for file in self.specs} for _ in range(world_size)
        ]
        self.own: dict[str, dict[str, Held]] = {file: {} for file in self.specs}

    def note(self, file: str, name: str, spec: Spec, rank: int, runs: list[Run]) -> None:
        known = self.specs[file].setdefault(name, spec)
        if known != spec:
            raise CheckpointError(f"the ranks have {name!r} as {_words(known)} and as {_words(spec)}")
        self.held[rank][file].setdefault(name, []).extend(runs)

    def hold(self, file: str, name: str, held: Held) -> None:
        self.own[file][name] = held


def _renamed(value: Any, prefix: str) -> Any:
    """Return an encoded value whose tensors have a prefix."""
    if isinstance(value, list):
        return [_renamed(item, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in ("$tensor", "$array"):
        return {key: prefix + name for key, name in value.items()}
    return {key: _renamed(item, prefix) for key, item in value.items()}


def _escaped(key: str) -> str:
    """Return a key without the mark between keys, as a JSON pointer has it: "a/b" is no "b" in "a"."""
    return key.replace("~", "~0").replace("/", "~1")


def _words(spec: Spec) -> str:
    return f"{tuple(spec.shape)} of {spec.dtype}"


def _origin(training: Training) -> dict[str, Any]:
    strategy = training.strategy
    return {
        "strategy": {
            "backend": strategy.backend,
            "options": {name: str(value) for name, value in strategy.options.items()},
            "precision": strategy.precision,
            "accumulate": strategy.accumulate,
        },
        "world_size": training.processes.world_size,
        "versions": {"shardkit": shardkit.__version__, "python": platform.python_version(), **_versions(training)},
    }


def _versions(training: Training) -> dict[str, str]:
    found: dict[str, str] = {"torch": str(torch.__version__)}
    library = training.library
    for name in [library] if library else []:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = str(getattr(sys.modules.get(name), "__version__", "unknown"))
    return found


def manifest(
    facts: Mapping[str, Any],
    *,
    model: dict[str, Any],
    optimizer: dict[str, Any] | None,
    objects: dict[str, Any],
    state: dict[str, Any],
    extra: dict[str, Any],
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return a manifest, but for what is known only once the files are written. All values are encoded."""
    return {
        **facts,
        "model": model,
        "optimizer": optimizer,
        "objects": objects,
        "state": state,
        "extra": extra,
        "ranks": ranks,
        "metadata": {WEIGHTS: {"format": "pt", **model["aliases"]}},
    }


def described_model(model: nn.Module, parameters: list[str]) -> dict[str, Any]:
    """Return what a manifest says of a model."""
    kind = type(model)
    found: dict[str, Any] = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "parameters": parameters,
        "frozen": [name for name, value in model.named_parameters() if not value.requires_grad],
        "aliases": aliases(model),
    }
    # What from_pretrained of the transformers library needs beside the weights.
    for key in ("config", "generation_config"):
        config: Any = getattr(model, key, None)
        if callable(getattr(model, "save_pretrained", None)) and callable(getattr(config, "to_json_string", None)):
            found[key] = json.loads(config.to_json_string(use_diff=False))
            found["unsaved"] = list(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return found


def _optimizer(training: Training, state: dict[str, dict[str, Any]], common: dict[str, Any]) -> dict[str, Any] | None:
    optimizer = training.engine.optimizer
    if optimizer is None:
        return None
    names = names_of(training.model)
    groups = [
        {"parameters": [names[id(value)] for value in group["params"]], "settings": values}
        for group, values in zip(optimizer.param_groups, common["groups"], strict=True)
    ]
    return {
        "class": type(optimizer).__qualname__,
        "groups": groups,
        "attributes": common["attributes"],
        "state": state,
    }
