"""From another library's checkpoint to one of shardkit's, in one process."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import shardkit
from shardkit import _registry
from shardkit._imported import Imported, Pieces, Source
from shardkit._processes import Alone
from shardkit.checkpoints import _directory, _torch_file, _torch_folder
from shardkit.checkpoints._capture import described_model, manifest
from shardkit.checkpoints._contents import OPTIMIZER, STATE, WEIGHTS, Held, encoded, of_one_process
from shardkit.checkpoints._fit import raise_unless_equal
from shardkit.checkpoints._layout import Spec
from shardkit.checkpoints._manifest import MANIFEST
from shardkit.checkpoints._names import Named, checked_names, name_parameters
from shardkit.checkpoints._training import aliases, buffers, settings
from shardkit.checkpoints._write import Writer, together
from shardkit.errors import CheckpointError, InputError

Progress = Callable[[int, int], None]


class Outcome(NamedTuple):
    """What an import wrote."""

    path: Path
    kind: str
    step: int
    weights: int
    """How many tensors the model has."""
    parameters: int
    """How many of them the optimizer has."""
    names: str
    """Who said what the optimizer's parameters are called."""
    left_out: list[str]
    """Entries of the source that a checkpoint can't hold."""


def import_checkpoint(
    source: str | Path,
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    names: Sequence[Sequence[str]] | Literal["order"] | None = None,
    optimizer_class: str | None = None,
    steps: int | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write a checkpoint of another library as one of shardkit's into a directory, and return its path.

    Not collective: one process does it. The source is a file that ``torch.save`` wrote, of a model's state dict or of a
    dictionary with the model's and the optimizer's; a folder that ``torch.distributed.checkpoint`` wrote; or what an
    installed plugin reads (``docs/import.md``). Where the optimizer's state lists its parameters by number, ``model``
    and ``optimizer``, unprepared and built as then, or ``names`` say which they are: a list with the names of each
    group, or ``"order"`` if each group was built in the order of the model's own. ``optimizer_class`` names the
    optimizer's class, so that a session with another refuses the checkpoint, and ``steps`` how many steps had moved
    the weights, where the source doesn't say. ``allow_pickle`` lets files run code of their own when they are read.

    Raises:
        CheckpointError: the source isn't whole or isn't known, or the names are ambiguous; nothing was written.
        InputError: an argument is wrong.
        StateError: another session saves to the directory.
    """
    return run(
        source,
        directory,
        model=model,
        optimizer=optimizer,
        names=names,
        optimizer_class=optimizer_class,
        steps=steps,
        allow_pickle=allow_pickle,
    ).path


def run(
    source: str | Path,
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    names: Any = None,
    optimizer_class: str | None = None,
    steps: int | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Do what :func:`import_checkpoint` does, and say what was done. ``progress`` gets the bytes written, and all."""
    if steps is not None and (type(steps) is not int or steps < 0):
        raise InputError(f"steps is how many steps moved the weights, from 0 on, not {steps!r}")
    names = checked_names(names)
    found = read(Source(Path(source), allow_pickle))
    written = _Plan(found, model, optimizer, names, optimizer_class, steps, str(source))
    root = Path(directory)
    if (root / MANIFEST).is_file():
        raise CheckpointError(f"{str(root)!r} is itself a checkpoint: import into the directory that holds it")
    alone = Alone()

    def take() -> Path:
        root.mkdir(parents=True, exist_ok=True)
        return _directory.free_path(root, written.step)

    path = together(alone, take)[0]
    lock = together(alone, lambda: _directory.Lock(root))[0]
    try:
        _directory.clean(root)
        writer = Writer(written.contents, 0)
        if progress is not None:
            writer.watch(progress)
        writer.write(path, alone, None)
    finally:
        lock.close()
    return Outcome(
        path,
        found.kind,
        written.step,
        len(written.weights),
        0 if written.named is None else len(written.named.names),
        "" if written.named is None else written.named.origin,
        written.left_out,
    )


def read(source: Source) -> Imported:
    """Return what another library's checkpoint holds.

    Raises:
        CheckpointError: there is nothing, or nothing that is known.
    """
    path = source.path
    if not path.exists():
        raise CheckpointError(f"there is nothing to import at {str(path)!r}")
    if (path / MANIFEST).is_file() or _directory.latest(path) is not None:
        raise CheckpointError(f"{str(path)!r} holds a checkpoint of shardkit already: load it as it is")
    found = _registry.read_other(source)
    if found is not None:
        return found
    if path.is_dir():
        if (path / _torch_folder.METADATA).is_file():
            return _torch_folder.read(source)
        inside = sorted(one.name for one in path.iterdir())
        told = f"it holds {', '.join(inside[:5])}" if inside else "it is empty"
        if any(name.endswith(".distcp") for name in inside):
            told = f"its {_torch_folder.METADATA} file is missing, without which nothing in it can be found"
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint that can be imported ({told}): it is a file of torch.save, a folder of "
            "torch.distributed.checkpoint, or one that an installed plugin reads"
        )
    return _torch_file.read(path, source.load(path))


class _Plan:
    """What is written."""

    def __init__(
        self,
        found: Imported,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        names: Any,
        optimizer_class: str | None,
        steps: int | None,
        source: str,
    ) -> None:

        self._found = found
        self.weights: dict[str, Tensor | Pieces] = dict(found.weights)
        self.aliases = dict(found.aliases)
        if model is not None:
            self._follow(model)
        self.left_out: list[str] = []
        self.named: Named | None = None
        if found.optimizer is not None:
            shapes = {name: tuple(value.shape) for name, value in self.weights.items()}
            self.named = name_parameters(found, self.aliases, shapes, model, optimizer, names)
            self._take_masters()
        self.step = self._steps() if steps is None else steps
        self._files: dict[str, dict[str, Any]] = {WEIGHTS: {}, OPTIMIZER: {}, STATE: {}}
        for name, value in self.weights.items():
            self._files[WEIGHTS][name] = _held(value)
        known = optimizer_class
        if known is None:
            known = found.optimizer_class if optimizer is None else type(optimizer).__qualname__
        self.contents = of_one_process(self._manifest(model, known, source), self._files)

    def _follow(self, model: nn.Module) -> None:
        """Call tied tensors as the model does, and raise unless the weights are the model's.

        Raises:
            CheckpointError: they aren't, or tensors that are tied in the model differ.
        """
        own = aliases(model)
        everything = {**self.weights, **{name: self.weights[first] for name, first in self.aliases.items()}}
        for name, first in own.items():
            given, kept = everything.get(name), everything.get(first)
            if given is None or kept is None:
                if given is not None:
                    everything[first] = given
                continue
            if given is not kept and not torch.equal(_whole(given), _whole(kept)):
                raise CheckpointError(
                    f"{name!r} and {first!r} are one tensor in the model, and differ in the source: hand over the "
                    "model as it was"
                )
        self.weights = {name: value for name, value in everything.items() if name not in own}
        self.aliases = own
        wanted = {**dict(model.named_parameters()), **buffers(model)}
        raise_unless_equal(
            "the model",
            {name: tuple(value.shape) for name, value in self.weights.items()},
            {name: tuple(value.shape) for name, value in wanted.items()},
            saved_words="the source",
            own_words="the model that was handed over",
        )

    def _take_masters(self) -> None:
        """Put weights of higher precision in the place of rounded ones.

        Raises:
            CheckpointError: rounded, they aren't the weights.
        """
        assert self.named is not None
        for key, master in self._found.masters.items():
            name = self.named.names[key]
            weight, whole = _whole(self.weights[name]), _whole(master)
            if not torch.equal(whole.to(weight.dtype), weight):
                raise CheckpointError(
                    f"the optimizer's weights of {name!r}, rounded to {weight.dtype}, aren't those of the model: the "
                    f"names are wrong ({self.named.origin}), or the files are of different saves"
                )
            self.weights[name] = master

    def _steps(self) -> int:
        """Return how many steps the source has done: what it says, or what the optimizer counted."""
        found = self._found
        if found.steps is not None or found.optimizer is None:
            return found.steps or 0
        counts = [one.get("step") for one in found.optimizer["state"].values() if isinstance(one, Mapping)]
        numbers = [float(count) for count in counts if isinstance(count, int | float | torch.Tensor)]
        return int(max(numbers, default=0))

    def _manifest(self, model: nn.Module | None, optimizer_class: str | None, source: str) -> dict[str, Any]:

        found = self._found
        facts = {
            "strategy": {"backend": None, "options": {}, "precision": None, "accumulate": None},
            "imported": {"kind": found.kind, "source": source, "left_out": self.left_out},
            "world_size": found.world_size,
            "versions": {
                "shardkit": shardkit.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                **found.versions,
            },
            "step": self.step,
            "skipped_steps": found.skipped_steps,
            "grad_norm": None,
            "scaler": None if found.scale is None else {"scale": found.scale, "growth_tracker": 0},
        }
        if model is not None:
            described = described_model(model, [name for name, _ in model.named_parameters()])
        else:
            buffers = set(found.buffers or ())
            described = {
                "class": None,
                "parameters": [name for name in self.weights if name not in buffers],
                "frozen": list(found.frozen),
                "aliases": self.aliases,
            }
        return manifest(
            facts,
            model=described,
            optimizer=self._optimizer(optimizer_class),
            objects={},
            state=self._rest("state", found.state),
            extra={name: self._encoded(value, f"extra/{name}") for name, value in found.extra.items()},
            ranks=[],
        )

    def _optimizer(self, optimizer_class: str | None) -> dict[str, Any] | None:

        given, named = self._found.optimizer, self.named
        if given is None or named is None:
            return None
        state: dict[str, dict[str, Any]] = {}
        for key, entries in given["state"].items():
            if key not in named.names:
                raise CheckpointError(f"the optimizer's state has {key!r}, which none of its groups lists")
            name = named.names[key]
            if not isinstance(entries, Mapping) or not all(isinstance(entry, str) for entry in entries):
                raise CheckpointError(f"the optimizer's state of {name!r} isn't a dictionary of values by name")
            for entry, value in entries.items():
                place = f"{name}/{entry}"
                if entry == "step" and type(value) in (int, float) and _counts_in_tensors(optimizer_class):
                    value = torch.tensor(float(value))
                if hasattr(value, "shape"):
                    self._files[OPTIMIZER][place] = _held(value)
                    state.setdefault(name, {})[entry] = {"$tensor": place}
                else:
                    one = encoded(value, place)
                    self._files[OPTIMIZER].update(one.tensors)
                    state.setdefault(name, {})[entry] = one.value
        groups = [
            {
                "parameters": [named.names[key] for key in group["params"]],
                "settings": self._encoded(settings(group), f"groups/{number}"),
            }
            for number, group in enumerate(given["param_groups"])
        ]
        return {"class": optimizer_class, "groups": groups, "attributes": {}, "state": state}

    def _encoded(self, value: Any, place: str) -> Any:

        found = encoded(value, place)
        self._files[STATE].update(found.tensors)
        return found.value

    def _rest(self, place: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what else the source holds, as far as a checkpoint can hold it."""

        kept: dict[str, Any] = {}
        for key, value in values.items():
            try:
                kept[key] = self._encoded(value, f"{place}/{key}")
            except CheckpointError:
                self.left_out.append(key)
        return kept


def _counts_in_tensors(optimizer_class: str | None) -> bool:
    """Return whether it is a class of torch's that refuses a number for ``step``, as it was before torch 1.12."""
    return hasattr(torch.optim, optimizer_class or "") and optimizer_class != "SparseAdam"


def _held(value: Tensor | Pieces) -> Tensor | Held:

    if isinstance(value, Pieces):
        return Held(Spec(value.runs[0][1].dtype, value.shape), value.runs)
    return value.detach()


def _whole(value: Tensor | Pieces) -> Tensor:
    """Return a tensor in one piece."""
    if not isinstance(value, Pieces):
        return value.detach()
    flat = torch.cat([run.reshape(-1) for _, run in sorted(value.runs, key=lambda run: run[0])])
    return flat.view(value.shape)
