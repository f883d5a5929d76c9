"""From a checkpoint to a session: what fits is checked first, then what is whole, and only then anything changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardkit._random import set_random_state
from shardkit.checkpoints._contents import OPTIMIZER, RANKS, STATE, WEIGHTS
from shardkit.checkpoints._fit import check_settings, keeps, raise_unless_equal
from shardkit.checkpoints._groups import apply_settings, settings_of, sources_of
from shardkit.checkpoints._read import Reader
from shardkit.checkpoints._schedules import regrouped
from shardkit.checkpoints._share import Part
from shardkit.checkpoints._training import Training, aliases, buffers, extra_states, names_of
from shardkit.checkpoints._values import decode, tensors_of
from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shardkit._engine import Shard

T = TypeVar("T")


class Restored(NamedTuple):
    """What a checkpoint gives back beside what it has put into the session."""

    manifest: dict[str, Any]
    state: dict[str, Any]
    windows: list[dict[str, Any] | None]
    """The position of each rank that wrote it."""


class _Small(NamedTuple):
    """What a checkpoint holds beside weights and the optimizer's state, as this rank gets it."""

    state: dict[str, Any]
    extra: dict[str, Any]
    objects: dict[str, Any]
    tensors: dict[str, Tensor]
    own: dict[str, Tensor]


def agreed(training: Training, action: Callable[[], T]) -> T:
    """Do something on this rank; if it fails on any, raise on all. Collective."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    training.processes.agree(None, failure)
    return result  # type: ignore[return-value]


def restore(training: Training, reader: Reader, objects: Mapping[str, Any], begin: Callable[[], None]) -> Restored:
    """Bring a session to where a checkpoint stands; ``begin`` is called before anything of it changes. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged or doesn't fit, on every rank; the session is as it was.
    """
    plan = agreed(training, lambda: _Plan(training, reader, objects))
    told = training.processes.agree(({file: plan.whole(file) for file in plan.parts}, plan.stateful()))
    agreed(training, lambda: plan.check_state([names for _, names in told]))
    agreed(training, lambda: plan.verify([whole for whole, _ in told]))
    held = agreed(training, plan.read_small)
    before = agreed(training, lambda: {key: copy.deepcopy(one.state_dict()) for key, one in objects.items()})
    try:
        agreed(training, lambda: plan.load_objects(held))
    except CheckpointError:
        # Also where they took it: all ranks go on from where they were.
        for key, state in before.items():
            # One that raises again has said what is wrong already.
            with suppress(Exception):
                objects[key].load_state_dict(state)
        raise
    begin()
    training.engine.restart()
    agreed(training, lambda: plan.fill(held))
    return plan.finish(held)


class _Plan:
    """What this rank reads into which tensor."""

    def __init__(self, training: Training, reader: Reader, objects: Mapping[str, Any]) -> None:
        self._training = training
        self._reader = reader
        self._objects = objects
        manifest = self._manifest = reader.manifest
        engine = training.engine
        self._first = _Names(training, manifest)
        self._weights = engine.weight_shards()
        self._check_weights()
        # A session without an optimizer evaluates: it needs the weights alone.
        self._optimizer = engine.optimizer
        self._groups: list[dict[str, Any]] = []
        self._sources: list[list[int]] = []
        if self._optimizer is not None:
            self._check_optimizer(self._optimizer)
        strategy = training.strategy
        origin = manifest["strategy"]
        options = {name: str(value) for name, value in strategy.options.items()}
        self._same_size = manifest["world_size"] == training.processes.world_size
        self._same_run = self._same_size and (origin["backend"], origin["options"]) == (strategy.backend, options)
        self._check_own()
        stepper = engine.stepper
        self._state = {} if stepper is None else stepper.state
        self._settings = (
            {id(value): group for group in stepper.param_groups for value in group["params"]} if stepper else {}
        )
        self.parts: dict[str, list[Part]] = {WEIGHTS: [], OPTIMIZER: [], STATE: [], RANKS: []}
        """What is checked before anything changes, and read into place then."""
        self._new: list[tuple[Shard, str, Part]] = []
        """State that this optimizer has no tensor for yet: it is read into new ones, and checked on the way."""
        self._fetched: dict[tuple[int, str], Tensor] = {}
        self._list_parts()

    # Whether it fits.

    def _check_weights(self) -> None:
        training, saved = self._training, self._reader.specs(WEIGHTS)
        own = {self._first.saved(name): tuple(shape) for name, shape in training.shapes.items()}
        own |= {self._first.saved(name): tuple(value.shape) for name, value in buffers(training.model).items()}
        found = {name: tuple(spec.shape) for name, spec in saved.items()}
        raise_unless_equal("the model", found, own)
        kinds = {shard.name: shard.values.dtype for shard in self._weights if not shard.rounded}
        kinds |= {name: value.dtype for name, value in buffers(training.model).items()}
        for name, kind in kinds.items():
            before = saved[self._first.saved(name)].dtype
            if not keeps(before, kind):
                raise CheckpointError(
                    f"{name!r} is of {before} in the checkpoint and of {kind} here, which would lose digits: give the "
                    "model the dtype that it was saved with"
                )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        saved = self._manifest["optimizer"]
        if saved is None:
            raise CheckpointError(
                "the checkpoint has no optimizer: the session that wrote it only evaluates. Prepare one without an "
                "optimizer, or load its weights.safetensors into the model before prepare"
            )
        own = type(optimizer).__qualname__
        if saved["class"] not in (None, own):
            raise CheckpointError(f"the checkpoint is of the optimizer {saved['class']}, and this session's is {own}")
        names = names_of(self._training.model)
        groups = [
            [self._first.saved(names[id(value)]) for value in group["params"]] for group in optimizer.param_groups
        ]
        place = {name: number for number, group in enumerate(saved["groups"]) for name in group["parameters"]}
        shapes = {self._first.saved(name): tuple(shape) for name, shape in self._training.shapes.items()}
        if self._manifest.get("imported"):
            check_settings(saved, optimizer)
            # Some libraries keep no frozen parameters in their groups, some do: they have no state.
            frozen = {
                self._first.saved(name)
                for name, value in self._training.model.named_parameters()
                if not value.requires_grad
            } - set(saved["state"])
            here = {name for group in groups for name in group}
            groups = [[name for name in group if name in place or name not in frozen] for group in groups]
            place = {name: number for name, number in place.items() if name in here or name not in frozen}
        raise_unless_equal(
            "the optimizer",
            {name: shapes.get(name, ()) for name in place},
            {name: shapes[name] for group in groups for name in group},
            hint=_hint([name for name in place if name in shapes and not any(name in group for group in groups)]),
        )
        for number, group in enumerate(groups):
            self._groups.append(settings_of(number, group, place, saved["groups"]))
            self._sources.append(sources_of(number, group, place, saved["groups"]))

    def stateful(self) -> set[str]:
        """Return the checkpoint's names of the parameters for which this rank takes optimizer state."""
        return {self._first.saved(shard.name) for shard, _ in self._state_entries()}

    def check_state(self, taken: Sequence[set[str]]) -> None:
        """Raise unless all state of the optimizer has a place on some rank.

        Raises:
            CheckpointError: it would be lost.
        """
        if self._optimizer is None:
            return
        shapes = {self._first.saved(name): shape for name, shape in self._training.shapes.items()}
        lost = sorted(set(self._manifest["optimizer"]["state"]).difference(*taken))
        lost = [name for name in lost if math.prod(shapes[name])]
        if lost:
            raise CheckpointError(
                f"the checkpoint has the optimizer's state of {lost[0]!r} {tuple(shapes[lost[0]])}, and this session "
                f"keeps none for it under backend {self._training.strategy.backend!r}, since it was frozen at prepare: "
                "freeze it after the load, or it would be lost"
            )

    def _check_own(self) -> None:
        manifest, differing = self._manifest, [rank["differing"] for rank in self._manifest["ranks"]]
        by_rank = sorted({key for entries in differing for key in entries})
        # An object that nobody asks for need not fit.
        needed = [key for key in by_rank if key[:8] != "objects/" or key[8:] in self._objects]
        if needed and not self._same_size:
            raise CheckpointError(
                f"{needed[0]!r} was different on each of the {manifest['world_size']} ranks that wrote the "
                f"checkpoint, so that it loads on as many, not on {self._training.processes.world_size}"
            )
        had = {*manifest["objects"], *(key.removeprefix("objects/") for key in by_rank if key.startswith("objects/"))}
        missing = sorted(set(self._objects) - had)
        if missing:
            held = ", ".join(map(repr, sorted(had))) or "none"
            raise CheckpointError(f"the checkpoint has no object {missing[0]!r}; it has {held}")
        lost = sorted(had - set(self._objects))
        if lost and self._optimizer is not None:
            raise CheckpointError(
                f"the checkpoint has the state of {lost[0]!r}: hand the object to load as "
                f"objects={{{lost[0]!r}: ...}}, or its state would be lost"
            )
        for key, target in self._objects.items():
            if not callable(getattr(target, "load_state_dict", None)):
                raise CheckpointError(f"object {key!r} is a {type(target).__name__}, without load_state_dict")

    # What is read.

    def _list_parts(self) -> None:
        saved = self._reader.specs(WEIGHTS)
        for shard in self._weights:
            self.parts[WEIGHTS].append(self._run(shard))
        for name in buffers(self._training.model):
            place = self._first.saved(name)
            self.parts[WEIGHTS].append(Part(place, 0, saved[place].numel))
        specs = self._reader.specs(OPTIMIZER)
        for shard, entries in self._state_entries():
            for key, value in entries.items():
                for name in tensors_of(value):
                    part = self._part(shard, name)
                    if _is_tensor(value) and self._held(shard, key, part) is None:
                        self._new.append((shard, key, part))
                    else:
                        self.parts[OPTIMIZER].append(part)
        for file, names in ((STATE, self._common_tensors()), (RANKS, self._own_tensors())):
            specs = self._reader.specs(file)
            self.parts[file] += [Part(name, 0, specs[name].numel) for name in names]

    def _run(self, shard: Shard, name: str | None = None) -> Part:
        return Part(name or self._first.saved(shard.name), shard.start, shard.start + shard.values.numel())

    def _state_entries(self) -> list[tuple[Shard, dict[str, Any]]]:
        if self._optimizer is None:
            return []
        state = self._manifest["optimizer"]["state"]
        return [(shard, state.get(self._first.saved(shard.name), {})) for shard in self._training.engine.state_shards()]

    def _per_element(self, shard: Shard, name: str) -> bool:
        spec = self._reader.specs(OPTIMIZER)[name]
        return tuple(spec.shape) == tuple(self._training.shapes[shard.name]) and name.rpartition("/")[2] != "step"

    def _common_tensors(self) -> list[str]:
        manifest = self._manifest
        held = [manifest["state"], manifest["extra"], *(manifest["objects"].get(key) for key in self._objects)]
        if self._optimizer is not None:
            held += [
                manifest["optimizer"]["attributes"],
                [group["settings"] for group in manifest["optimizer"]["groups"]],
            ]
        return tensors_of(held)

    def _own_tensors(self) -> list[str]:
        rank = self._training.processes.rank
        ranks = self._manifest["ranks"]
        own = tensors_of([ranks[rank]["random"], ranks[rank]["differing"]]) if rank < len(ranks) else []
        if self._same_run:
            own += tensors_of(ranks[rank]["engine"])
        return list(dict.fromkeys([*own, *(name for each in ranks for name in tensors_of(each["windows"]))]))

    def whole(self, file: str) -> set[str]:
        """Return the names of the tensors that this rank reads whole."""
        specs = self._reader.specs(file)
        return {name for name, start, end in self.parts[file] if start == 0 and end == specs[name].numel}

    def verify(self, whole: Sequence[Mapping[str, set[str]]]) -> None:
        """Check the checksums of what this rank reads, of what all ranks read its part; read the state that is new.

        Raises:
            CheckpointError: a file is damaged.
        """
        rank, size = self._training.processes.rank, len(whole)
        checked: list[tuple[str, Part]] = []
        for file, parts in self.parts.items():
            everywhere = set.intersection(*(names[file] for names in whole))
            number = 0
            for part in parts:
                if part.name not in everywhere:
                    checked.append((file, part))
                    continue
                for piece in self._reader.cut(file, part):
                    if number % size == rank:
                        checked.append((file, piece))
                    number += 1
        self._reader.each(partial(self._reader.verify, file, [part]) for file, part in checked)
        self._reader.each(partial(self._fetch, *new) for new in self._new)

    def read_small(self) -> _Small:
        """Read what is no part of the weights or the optimizer's state."""
        manifest = self._manifest
        tensors = {name: self._reader.read(STATE, name) for name in self._common_tensors()}
        own = {name: self._reader.read(RANKS, name) for name in self._own_tensors()}
        found = {
            "state": dict(decode(manifest["state"], tensors)),
            "extra": dict(decode(manifest["extra"], tensors)),
            "objects": {
                key: decode(manifest["objects"][key], tensors) for key in self._objects if key in manifest["objects"]
            },
        }
        rank, ranks = self._training.processes.rank, manifest["ranks"]
        for key, value in ranks[rank]["differing"].items() if rank < len(ranks) else ():
            kind, _, name = key.partition("/")
            if kind != "objects" or name in self._objects:
                found[kind][name] = decode(value, own)
        if self._optimizer is not None:
            groups = len(manifest["optimizer"]["groups"])
            for key, target in self._objects.items():
                given = found["objects"][key]
                found["objects"][key] = regrouped(key, target, given, self._optimizer, self._sources, groups)
        return _Small(found["state"], found["extra"], found["objects"], tensors, own)

    # What changes.

    def load_objects(self, held: _Small) -> None:
        """Give the user's objects their state."""
        for key, target in self._objects.items():
            try:
                target.load_state_dict(held.objects[key])
            except Exception as error:
                raise CheckpointError(
                    f"object {key!r} didn't take its state from the checkpoint: {type(error).__name__}: {error}"
                ) from error

    def fill(self, held: _Small) -> None:
        """Read weights, buffers and the optimizer's state into their places."""
        reader, specs = self._reader, self._reader.specs(WEIGHTS)
        places = [(WEIGHTS, self._run(shard), shard.values) for shard in self._weights]
        for name, value in buffers(self._training.model).items():
            place = self._first.saved(name)
            places.append((WEIGHTS, Part(place, 0, specs[place].numel), value))
        stepper = self._training.engine.stepper
        if self._optimizer is not None and stepper is not None:
            places += self._place_state(stepper)
            apply_settings(self._optimizer, self._groups, self._manifest["optimizer"]["attributes"], held.tensors)
        reader.each(partial(reader.read_into, *place) for place in places)
        for name, part in extra_states(self._training.model):
            if name in held.extra:
                part.set_extra_state(held.extra[name])

    def finish(self, held: _Small) -> Restored:
        """Have the engine follow, and put back the random state. Collective."""
        training, ranks = self._training, self._manifest["ranks"]
        rank = training.processes.rank
        training.engine.loaded()
        if self._same_run:
            training.engine.load_state_dict(decode(ranks[rank]["engine"], held.own))
        if rank < len(ranks):
            set_random_state(decode(ranks[rank]["random"], held.own), training.device)
        windows = [decode(each["windows"], held.own) for each in ranks]
        return Restored(self._manifest, held.state, windows)

    def _place_state(self, stepper: Optimizer) -> list[tuple[str, Part, Tensor]]:
        """Give the optimizer the entries of its state; return which tensors of it are yet to be read into."""
        stale = set(stepper.state)
        places: list[tuple[str, Part, Tensor]] = []
        for shard, entries in self._state_entries():
            if not entries:
                continue
            stale.discard(shard.values)
            before, found = stepper.state[shard.values], {}
            for key, value in entries.items():
                if not _is_tensor(value):
                    found[key] = decode(value, {name: self._reader.read(OPTIMIZER, name) for name in tensors_of(value)})
                    continue
                found[key] = self._fetched.pop((id(shard.values), key), None)
                if found[key] is None:
                    found[key] = before[key]
                    places.append((OPTIMIZER, self._part(shard, value["$tensor"]), before[key]))
            before.clear()
            before.update(found)
        for left in stale:
            del stepper.state[left]
        return places

    def _part(self, shard: Shard, name: str) -> Part:
        """Return what of a tensor of the optimizer's state a shard needs."""
        spec = self._reader.specs(OPTIMIZER)[name]
        return self._run(shard, name) if self._per_element(shard, name) else Part(name, 0, spec.numel)

    def _held(self, shard: Shard, key: str, part: Part) -> Tensor | None:
        """Return the tensor of the optimizer's state that a part can be read into; None if there is none yet."""
        held = self._state.get(shard.values, {}).get(key)
        spec = self._reader.specs(OPTIMIZER)[part.name]
        facts = (spec.dtype, self._state_device(shard, key), part.end - part.start)
        if isinstance(held, Tensor) and (held.dtype, held.device, held.numel()) == facts and held.dim() > 0:
            return held
        return None

    def _state_device(self, shard: Shard, key: str) -> torch.device:
        group = self._settings.get(id(shard.values), {})
        # Torch keeps the count of steps on the CPU unless a kernel of the device needs it.
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return shard.values.device if on_device else torch.device("cpu")

    def _fetch(self, shard: Shard, key: str, part: Part) -> None:
        """Read a tensor of the optimizer's state that is new."""
        spec = self._reader.specs(OPTIMIZER)[part.name]
        if self._per_element(shard, part.name):
            target = torch.empty_like(shard.values.detach(), dtype=spec.dtype)
        else:
            target = torch.empty(spec.shape, dtype=spec.dtype, device=self._state_device(shard, key))
        self._reader.fetch(OPTIMIZER, part, target)
        self._fetched[id(shard.values), key] = target


def _hint(left_out: list[str]) -> str:
    if not left_out:
        return ""
    return (
        f"; the model has {left_out[0]!r}, but the optimizer lacks it: hand it over as then, and to train without it "
        "freeze it after the load"
    )


def _is_tensor(value: Any) -> bool:
    """Return whether an encoded value is one tensor."""
    return isinstance(value, dict) and list(value) == ["$tensor"]


class _Names:
    """What this model calls a parameter, and what the checkpoint does: of tied ones any may come first."""

    def __init__(self, training: Training, manifest: Mapping[str, Any]) -> None:
        cure = "tie them as they were"
        if manifest.get("imported"):
            cure = "what was imported didn't say what was tied; import it again with the model (--workload, or model=)"
        self._own = _groups(aliases(training.model))
        self._saved = _groups(manifest["model"]["aliases"])
        firsts = {name: first for first, names in self._saved.items() for name in names}
        self._to_saved: dict[str, str] = {}
        for first, names in self._own.items():
            found = {firsts.get(name, name) for name in names}
            if len(found) > 1 or self._saved.get(next(iter(found))) != names:
                together = sorted(self._saved.get(next(iter(found)), {next(iter(found))}))
                raise CheckpointError(
                    f"{', '.join(sorted(names))} are one tensor here, and in the checkpoint {', '.join(together)} is "
                    f"apart from the rest: {cure}"
                )
            self._to_saved[first] = found.pop()
        for first, names in self._saved.items():
            if names not in self._own.values():
                raise CheckpointError(
                    f"{', '.join(sorted(names))} are one tensor in the checkpoint, and here they aren't: tie them as "
                    f"they were, with {first!r} first"
                )

    def saved(self, name: str) -> str:
        """Return the checkpoint's name of a parameter or buffer of this model."""
        return self._to_saved.get(name, name)


def _groups(aliases: Mapping[str, str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, first in aliases.items():
        found.setdefault(first, {first}).add(name)
    return found
