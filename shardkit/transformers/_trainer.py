"""The library's Trainers over a session."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import DummyOptim, gather_object
from transformers.trainer_utils import has_length

import shardkit
from shardkit._prepare import understood
from shardkit.errors import MismatchError, StrategyError
from shardkit.transformers._accelerator import Accelerator, close, is_open
from shardkit.transformers._arguments import _Flags
from shardkit.transformers._checkpoints import Checkpoints
from shardkit.transformers._loss import ignores_the_count, warn_of_the_count
from shardkit.transformers._sampler import alike

if TYPE_CHECKING:
    from torch import nn


logger = logging.getLogger(__name__)


class _OverSession(Checkpoints):
    """What a Trainer does otherwise under a flag: nothing but what concerns its accelerator, and checkpoints."""

    callback_handler: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    _created_lr_scheduler: bool
    _trainable: int
    """How many elements of parameters are trained."""
    _operations: int
    """How many operations the library counts for one element of the input."""
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

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # Another Trainer's session may hold it still, and its parameters be in pieces.
        close(model)
        super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._strategy is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        # Gradients are the session's: the library would look at them for meshes of several dimensions.
        self._mixed_mesh_grads = False
        if self.accelerator.session is None or not is_open(self.model):
            # Once they are sharded, parameters may have no elements to count.
            close(self.model)
            self._trainable = super().get_num_trainable_parameters()  # type: ignore[misc]
            self._operations = super().floating_point_ops({self._input_name: torch.zeros(1)})  # type: ignore[misc]
        self._look_at_loss()
        self._look_at_callbacks()
        _check_alike(
            {"steps": max_steps, "micro-batches an epoch": _length(train_dataloader)}, "the loader of the training"
        )
        if self._file is not None:
            # Before the model is prepared. What the library makes itself is made anew in each training.
            handed = None if self._created_lr_scheduler else self.lr_scheduler
            self._file.check_steps(self.args, max_steps, handed)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]

    def _look_at_loss(self) -> None:
        own = self.compute_loss_func is None and self.label_smoother is None and self.model_accepts_loss_kwargs
        parts = self.args.gradient_accumulation_steps * self.args.world_size
        if own and parts > 1 and self.args.process_index == 0 and ignores_the_count(self.model):
            warn_of_the_count(self.model, parts)

    def _look_at_callbacks(self) -> None:
        event = transformers.TrainerCallback.on_pre_optimizer_step
        looking = [
            type(one).__name__
            for one in self.callback_handler.callbacks
            if type(one).on_pre_optimizer_step is not event
        ]
        if looking and self.args.max_grad_norm and self.args.process_index == 0:
            logger.warning(
                f"{', '.join(looking)} sees gradients before they are clipped, and what it changes is clipped with the "
                "rest: under a strategy the step clips, and on_pre_optimizer_step comes before it"
            )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        return sampler if self._strategy is None else alike(sampler)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        sampler = super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]
        return sampler if self._strategy is None else alike(sampler)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate over a loader, which must be equally long on every rank."""
        if self._strategy is not None:
            _check_alike({"batches": _length(dataloader)}, "the loader of an evaluation")
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return super().evaluation_loop(*arguments)  # type: ignore[misc]

    def get_num_trainable_parameters(self) -> int:
        """Return the number of parameters' elements that are trained, of all ranks together."""
        if self.session is None:
            return super().get_num_trainable_parameters()  # type: ignore[misc, no-any-return]
        return self._trainable

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return an estimate of the operations of a micro-batch's forward and backward."""
        if self.session is None:
            return super().floating_point_ops(inputs)  # type: ignore[misc, no-any-return]
        return self._operations * inputs[self._input_name].numel() if self._input_name in inputs else 0

    @property
    def _input_name(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")


def _length(loader: Any) -> int | None:
    return len(loader) if has_length(loader) else None


def _check_alike(numbers: dict[str, int | None], whence: str) -> None:
    """Raise if a number isn't the same on every rank: one would wait for the others without an end. Collective.

    Raises:
        MismatchError: on every rank.
    """
    told = gather_object([numbers])
    if any(other != told[0] for other in told):
        listed = "".join(
            f"\n  rank {rank}: " + ", ".join(f"{value} {name}" for name, value in other.items())
            for rank, other in enumerate(told)
        )
        raise MismatchError(
            f"{whence} isn't equally long on every rank, and one would wait for the others:{listed}\n  give all ranks "
            "the same arguments, and loaders of the same length, for example by a DistributedSampler"
        )


class Trainer(_OverSession, transformers.Trainer):  # type: ignore[misc]
    """The library's ``Trainer``, which trains under the strategy that its arguments' flags mean.

    Raises:
        ShardkitError: something can't be done right; the same error on every rank.
    """


class Seq2SeqTrainer(_OverSession, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """The library's ``Seq2SeqTrainer``, which trains under the strategy that its arguments' flags mean."""
