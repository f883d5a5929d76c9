"""A Trainer's checkpoints: a session's beside the library's own files, and what is taken over from others."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils import DummyOptim
from transformers.trainer import CONFIG_NAME, OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

import shardkit
from shardkit._engine import Engine
from shardkit._imported import Source
from shardkit._processes import Processes
from shardkit.checkpoints import import_checkpoint
from shardkit.checkpoints._fit import check_settings
from shardkit.checkpoints._names import ELEMENTWISE
from shardkit.checkpoints._training import names_of, settings
from shardkit.checkpoints._write import together
from shardkit.errors import CheckpointError
from shardkit.transformers._accelerator import close

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHECKPOINT = "shardkit"
"""The folder of a Trainer's checkpoint that holds the session's."""

_IMPORTED = ".shardkit-imported"
"""Where a checkpoint of another library lies from its import to the end of the load, in the Trainer's output folder."""

_NAME = re.compile(r"checkpoint-(\d+)")


class _Kind(Enum):
    """Who wrote the optimizer's state of a Trainer's checkpoint."""

    SESSION = "a session, under a flag"
    ENGINE = "DeepSpeed's engine, under the library's own integration"
    OPTIMIZER = "the library, as torch.optim gives it; FairScale's consolidated state has the same form"
    NOBODY = "nobody: there are weights alone"

    @classmethod
    def of(cls, folder: str | Path) -> _Kind:
        folder = Path(folder)
        if (folder / CHECKPOINT).is_dir():
            return cls.SESSION
        if (folder / "latest").is_file():
            return cls.ENGINE
        return cls.OPTIMIZER if (folder / OPTIMIZER_NAME).is_file() else cls.NOBODY


class Checkpoints:
    """What of a Trainer's checkpoints is otherwise under a flag."""

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    _strategy: shardkit.Strategy | None
    _taken: list[dict[str, Any]] | None = None
    """The settings of the optimizer's groups in a checkpoint of the library's own, while it is taken over."""

    if TYPE_CHECKING:

        @property
        def session(self) -> shardkit.Session | None: ...

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` loads: whole weights in full precision, and the configuration.

        Collective where a strategy splits the weights: every rank must call it.
        """
        save = partial(super().save_model, output_dir, _internal_call)  # type: ignore[misc]
        # Within a checkpoint all ranks are here. A user may have one rank save what it holds whole.
        if self.session is None or (_is_whole(self.session) and not _internal_call):
            save()
        else:
            self.session._processes.meet("save_model")
            self._together(save)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if state_dict is None and self.session is not None and not _is_whole(self.session):
            state_dict = self.session.full_weights()
            if not self.args.should_save:
                # One rank writes, and needs them.
                state_dict = {}
        named = self.model.named_parameters() if state_dict else ()
        kinds = [(state_dict[name].dtype, value.dtype) for name, value in named if value.is_floating_point()]  # type: ignore[index]
        # It empties the dictionary.
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if kinds and kinds[0][0] != kinds[0][1]:
            self._say_precision(Path(output_dir or self.args.output_dir, CONFIG_NAME), kinds[0][0])

    def _say_precision(self, file: Path, kind: torch.dtype) -> None:
        """Have the configuration say in which precision the weights are written.

        The library says in which the model computes, and ``from_pretrained`` would round them to that.
        """
        if not file.is_file():
            return
        told = str(kind).removeprefix("torch.")
        self.model.config.dtype = told
        config = {**json.loads(file.read_text(encoding="utf-8")), "dtype": told}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._strategy is not None and self.args.should_save:
            # Written last, it marks a whole checkpoint. An earlier run may have left one of the same step.
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")  # type: ignore[attr-defined]
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        save = partial(super()._save_checkpoint, model, trial)  # type: ignore[misc]
        # Together, so that it is whole for every rank that goes on.
        save() if self.session is None else self._together(save)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        session = self.session
        if session is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        objects, state = {"lr_scheduler": self.lr_scheduler}, {"samples_per_step": self._samples_per_step}
        session.save(Path(output_dir, CHECKPOINT), objects=objects, state=state)
        # Each checkpoint has a folder of its own: nobody else waits for this one, and its lock is an open file.
        session._keeper.close()
        self._together(lambda: self._warn_off(output_dir))

    def _warn_off(self, output_dir: str) -> None:
        """Leave an optimizer's file without groups, so that the library's own Trainer refuses the folder.

        Without that file it would go on with a fresh optimizer, and say nothing.
        """
        if self.args.should_save:
            told = f"the optimizer's state is in the folder {CHECKPOINT!r}, and written by shardkit"
            torch.save({"state": {}, "param_groups": [], "note": told}, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        save = partial(super()._save_rng_state, output_dir)  # type: ignore[misc]
        # Together, since the file that marks a whole checkpoint is written next.
        save() if self.session is None else self._together(save)

    # Resuming.

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; ``resume_from_checkpoint=True`` goes on from the last whole checkpoint of the output folder.

        Raises:
            CheckpointError: a checkpoint isn't whole, or doesn't fit; the same error on every rank.
        """
        if self._strategy is not None and resume_from_checkpoint is True:
            output_dir = Path(self.args.output_dir)
            found, broken = self._before_session(lambda: _last_whole(output_dir))
            resume_from_checkpoint = found or True
            for told in broken:
                self._warn(f"{told}. Going on from {found!r}, which is whole")
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)  # type: ignore[misc]
        folder, kind = Path(resume_from_checkpoint), _Kind.of(resume_from_checkpoint)
        self._taken = None
        if self._strategy is None:
            if kind is _Kind.SESSION:
                raise CheckpointError(
                    f"{resume_from_checkpoint!r} was written under a strategy of shardkit, and no flag asks for one: "
                    "go on with the flag that it was written with, or with another one, such as --strategy ddp"
                )
            load()
            return
        if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")) or kind is not _Kind.NOBODY:
            self._before_session(lambda: _require_whole(folder))
        if kind in (_Kind.NOBODY, _Kind.OPTIMIZER):
            self._take_over(folder, kind, load)
        # In other folders the weights come with the optimizer's state.

    def _take_over(self, folder: Path, kind: _Kind, load: Callable[[], None]) -> None:
        """Load the weights that the library's own Trainer saved, and its optimizer's state, before there is a session.

        A session that is opened over the optimizer goes on with the state.
        """
        if kind is _Kind.NOBODY:
            load()
            return
        close(self.model)
        self.create_optimizer()  # type: ignore[attr-defined]
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        state = self._before_session(lambda: _checked_state(folder, self.model, optimizer))
        load()
        optimizer.load_state_dict(state)
        self._taken = [settings(group) for group in optimizer.param_groups]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        session = self.session
        if checkpoint is None or session is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder = Path(checkpoint)
        kind = _Kind.of(folder)
        if kind is _Kind.SESSION:
            schedule = {"lr_scheduler": _Schedule(self.lr_scheduler)}
            state = session.load(folder / CHECKPOINT, objects=schedule) or {}
            before = state.get("samples_per_step", self._samples_per_step)
            if before != self._samples_per_step:
                self._warn(
                    f"{checkpoint!r} was written with {before} samples a step, and here a step has "
                    f"{self._samples_per_step}: the run goes on after as many steps, at another sample. Keep the "
                    "number by trading processes for --per_device_train_batch_size or --gradient_accumulation_steps"
                )
        elif kind is _Kind.ENGINE:
            state = self._import(session, folder)
            told = (folder / SCHEDULER_NAME).is_file()
            self._load_schedule(folder, _read(folder / SCHEDULER_NAME) if told else state.get("lr_scheduler"))
        elif kind is _Kind.OPTIMIZER:
            assert self._taken is not None
            self._load_schedule(folder, _read(folder / SCHEDULER_NAME))
            for group, taken in zip(session.optimizer.param_groups, self._taken, strict=True):
                # A schedule that begins writes its first rate.
                group.update(taken)
            self._taken = None
        else:
            self._warn(
                f"{checkpoint!r} holds weights and no optimizer's state, as --save_only_model leaves it: the optimizer "
                "and the schedule start afresh"
            )

    def _load_schedule(self, folder: Path, state: Any) -> None:
        session = self.session
        assert session is not None

        def load() -> None:
            if not isinstance(state, Mapping):
                raise CheckpointError(f"{str(folder)!r} holds an optimizer's state, but none of a schedule")
            _Schedule(self.lr_scheduler).load_state_dict(dict(state))

        self._together(load)

    def _import(self, session: shardkit.Session, folder: Path) -> dict[str, Any]:
        """Take over a checkpoint of another library, and return what else it holds."""
        place = Path(self.args.output_dir, _IMPORTED)
        own = names_of(session._engine.model)
        names = [[own[id(value)] for value in group["params"]] for group in session.optimizer.param_groups]

        def imported() -> None:
            if session.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                import_checkpoint(folder, place, names=names)

        try:
            self._together(imported)
            return session.load(place) or {}
        finally:
            if session.rank == 0:
                shutil.rmtree(place, ignore_errors=True)

    def _load_scaler(self, checkpoint: str | None) -> None:
        session = self.session
        if session is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]
            return
        file = None if checkpoint is None else Path(checkpoint, SCALER_NAME)
        if file is None or session.scaler is None or not file.is_file():
            return
        # Of the library's own Trainer: a session's comes with it.
        held = self._together(lambda: _read(file))
        session.scaler.load_state_dict({"scale": held["scale"], "growth_tracker": held["_growth_tracker"]})
        session._engine.loss_scale = session.scaler.scale

    @property
    def _samples_per_step(self) -> int:
        args: Any = self.args
        return int(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)  # type: ignore[attr-defined]

    def _warn(self, told: str) -> None:
        if self.args.process_index == 0:
            logger.warning(told)

    def _together(self, action: Callable[[], T]) -> T:
        """Do something on every rank of the session; if it fails on one, raise on all."""
        assert self.session is not None
        return together(self.session._processes, action)[self.session.rank]

    def _before_session(self, action: Callable[[], T]) -> T:
        """Do something on every rank before there is a session; return what it gave here; if it fails on one, raise."""
        processes, found = Processes(self.args.device), []
        try:
            together(processes, lambda: found.append(action()), "read")
        finally:
            processes.close()
        return found[0]


class _Schedule:
    """A schedule that refuses the state of one of another kind."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return dict(self._schedule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        lacking = sorted(key for key in self.state_dict() if key[0] != "_" and key != "verbose" and key not in state)
        if lacking:
            raise CheckpointError(
                f"the schedule is a {type(self._schedule).__name__}, whose {lacking[0]!r} the checkpoint lacks: it was "
                f"written with a schedule of another kind, which has {', '.join(map(repr, sorted(state)))}"
            )
        self._schedule.load_state_dict(state)


def _is_whole(session: shardkit.Session) -> bool:
    """Return whether the module itself holds whole weights in full precision on every rank, at any time."""
    kind = type(session._engine)
    return kind.full_weights is Engine.full_weights or (
        kind.gathered is Engine.gathered and session.strategy.precision == "fp32"
    )


def _last_whole(output_dir: Path) -> tuple[str | None, list[str]]:
    """Return the last checkpoint whose save has ended, and what is wrong with later ones; None if there is none at all.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    folders = {int(found[1]): path for path in output_dir.glob("checkpoint-*") if (found := _NAME.fullmatch(path.name))}
    broken: list[str] = []
    for _, folder in sorted(folders.items(), reverse=True):
        try:
            _require_whole(folder)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return str(folder), broken
    if broken:
        raise CheckpointError(f"no checkpoint in {str(output_dir)!r} is whole: {broken[0]}")
    return None, []


def _require_whole(folder: Path) -> None:
    """Raise unless a checkpoint has the file that is written last.

    Raises:
        CheckpointError: its save was interrupted.
    """
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        told = f"has no {TRAINER_STATE_NAME}, which is written last"
    except (OSError, ValueError) as error:
        told = f"has a damaged {TRAINER_STATE_NAME} ({error})"
    else:
        return
    raise CheckpointError(f"{str(folder)!r} {told}: its save was interrupted, or it holds a model and no checkpoint")


def _read(file: Path) -> Any:
    """Return what ``torch.save`` wrote, without running any code of it; None if there is no such file."""
    return Source(file).load(file) if file.is_file() else None


def _checked_state(folder: Path, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state that the library's own Trainer saved, once it is known to fit.

    Raises:
        CheckpointError: it is damaged, or of another optimizer or model, or without its schedule.
    """
    file = folder / OPTIMIZER_NAME
    if isinstance(optimizer, DummyOptim):
        raise CheckpointError(
            f"{str(file)!r} is of an optimizer that the arguments described, and here the DeepSpeed file describes "
            "one: take 'optimizer' out of the file, so that the arguments do"
        )
    state = _read(file)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(f"{str(file)!r} isn't what torch.optim's state_dict gives")
    if "note" in state:
        raise CheckpointError(
            f"{str(folder)!r} was written under a strategy of shardkit, and its folder {CHECKPOINT!r}, which holds the "
            "optimizer's state and the weights, is missing"
        )
    groups = [dict(group) for group in state["param_groups"]]
    for group in groups:
        if group.get("correct_bias") is True:
            # Of the AdamW that the library had until 4.x: it does as torch's.
            del group["correct_bias"]
    sizes = [[len(group["params"]) for group in held] for held in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{str(file)!r} has {_listed(sizes[0])} parameters in the groups of its optimizer, and this model's has "
            f"{_listed(sizes[1])}: it is of another model, or of other groups"
        )
    check_settings({"groups": [{"settings": settings(group)} for group in groups]}, optimizer)
    names = names_of(model)
    keys = [key for group in groups for key in group["params"]]
    values = [value for group in optimizer.param_groups for value in group["params"]]
    for key, value in zip(keys, values, strict=True):
        entries = state["state"].get(key, {})
        # Other libraries' may keep less than a number for each of the parameter's. Torch itself doesn't look.
        for entry in ELEMENTWISE & entries.keys() if type(optimizer).__module__.startswith("torch.optim") else ():
            if entries[entry].shape != value.shape:
                raise CheckpointError(
                    f"{str(file)!r} has {entry!r} of shape {tuple(entries[entry].shape)} where this model has "
                    f"{names[id(value)]!r} {tuple(value.shape)}: it is of another model, or of other groups"
                )
    if not isinstance(_read(folder / SCHEDULER_NAME), Mapping):
        raise CheckpointError(f"{str(folder)!r} has {OPTIMIZER_NAME}, but no schedule's state in {SCHEDULER_NAME}")
    return {"state": state["state"], "param_groups": groups}


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes)) or "no"
