"""The library's Trainers over a session."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import transformers
from accelerate.utils import DummyOptim

import shardkit
from shardkit._prepare import understood
from shardkit.errors import StrategyError
from shardkit.transformers._accelerator import Accelerator
from shardkit.transformers._arguments import _Flags
from shardkit.transformers._checkpoints import Checkpoints

if TYPE_CHECKING:
    from torch import nn


class _OverSession(Checkpoints):
    """What a Trainer does otherwise under a flag: nothing but what concerns its accelerator, and checkpoints."""

    _created_lr_scheduler: bool
    _strategy: shardkit.Strategy | None = None
    """What the flags mean; None without one, when all is the library's."""

    @functools.wraps(transformers.Trainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        file = self._file
        if file is not None:
            self.lr_scheduler = file.take(self.optimizer, self.lr_scheduler)
            if self.optimizer is not None:
                handed = ("optimizer",) if self.lr_scheduler is None else ("optimizer", "schedule")
                self._strategy = self.accelerator.strategy = self.args.to_strategy(handed=handed)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and have it train under the strategy."""
        args = self.args
        self._strategy = args.to_strategy() if isinstance(args, _Flags) else None
        if self._strategy is not None:
            if args.sharded_ddp and args.world_size == 1:
                raise StrategyError(
                    "--sharded_ddp splits over several processes, and this is one alone: launch them with torchrun "
                    "--nproc_per_node N, or leave the flag"
                )
            if self._strategy.backend != "auto":
                understood(self._strategy, args.device)
            # One process drives one device.
            args._n_gpu = min(args._n_gpu, 1)
        if self.session is not None:
            # A search over hyperparameters makes an accelerator for each trial.
            self.accelerator.end()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._strategy is not None:
            self.accelerator = Accelerator.over(self.accelerator, self._strategy)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        # The session runs the model in the strategy's precision, and scales the loss.
        return built if self._strategy is None else {**built, "mixed_precision": "no"}

    @property
    def session(self) -> shardkit.Session | None:
        """The session in which the model trains; None before the training, once it is closed, and without a flag."""
        session: shardkit.Session | None = getattr(getattr(self, "accelerator", None), "session", None)
        return None if session is None or session._closed else session

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer of the arguments, or leave it to the session where a DeepSpeed file describes it."""
        file = self._file
        if file is not None and file.optimizer and self.optimizer is None:
            self.optimizer = DummyOptim(params=[])
            return self.optimizer
        return super().create_optimizer(model)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the arguments, or that which a DeepSpeed file describes."""
        file = self._file
        if file is not None and file.scheduler and self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = file.make_scheduler(optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    @property
    def _file(self) -> Any:
        return None if self._strategy is None else self.args.deepspeed_file

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._strategy is not None:
            # Gradients are the session's: the library would look at them for meshes of several dimensions.
            self._mixed_mesh_grads = False
        if self._file is not None:
            # Before the model is prepared. What the library makes itself is made anew in each training.
            handed = None if self._created_lr_scheduler else self.lr_scheduler
            self._file.check_steps(self.args, max_steps, handed)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]


class Trainer(_OverSession, transformers.Trainer):  # type: ignore[misc]
    """The library's ``Trainer``, which trains under the strategy that its arguments' flags mean.

    Raises:
        ShardkitError: something can't be done right; the same error on every rank.
    """


class Seq2SeqTrainer(_OverSession, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """The library's ``Seq2SeqTrainer``, which trains under the strategy that its arguments' flags mean."""
