"""The loop's half of a session: backward, step, and windows over a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from shardkit._alike import Alike
from shardkit._aside import Aside, open_asides
from shardkit._checks import checked_loss
from shardkit._count import Count
from shardkit._guard import guard
from shardkit._loads import Loads
from shardkit._nonfinite import report_nonfinite
from shardkit._precision import autocast, make_scaler, spoil
from shardkit._tripwire import Tripwire, disarm
from shardkit._windows import Training, Weight, Windows
from shardkit.errors import InputError, StateError
from shardkit.gradients import all_finite, gradients

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit._backend import Backend
    from shardkit._buffers import Buffers
    from shardkit._engine import Engine
    from shardkit._precision import LossScaler
    from shardkit._processes import Processes
    from shardkit._strategy import Strategy
    from shardkit.checkpoints._keeper import Keeper

B = TypeVar("B")


class Loop:
    """A model and its optimizer under a strategy, as a training loop uses them."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        strategy: Strategy,
        backend: Backend,
        processes: Processes,
        buffers: Buffers | None,
        keeper: Keeper,
        device: torch.device,
        forget: Callable[[], None],
    ) -> None:
        self.model: nn.Module = model
        self.strategy: Strategy = strategy
        self.backend: Backend = backend
        self.steps: int = 0
        """Steps that moved the weights."""
        self.skipped_steps: int = 0
        """Steps left out because a loss or gradient wasn't finite."""
        self.step_was_skipped: bool = False
        """Whether the last window's step was left out."""
        self.scaler: LossScaler | None = make_scaler(strategy)
        """The loss scale of precision fp16, None in others."""
        self._engine = engine
        self._processes = processes
        self._buffers = buffers
        self._keeper = keeper
        self._device = device
        self._forget = forget
        self._count = Count(strategy.accumulate)
        self._windows: Windows[Any] | None = None
        self._progress: dict[str, Any] | None = None
        engine.loss_scale = 1.0 if self.scaler is None else self.scaler.scale
        self._losses: list[float | Tensor] = []
        self._seed: Tensor | None = None
        self._factor = 0.0
        self._grad_norm: float | None = None
        self._failed = ""
        self._closed = False
        self._loads = Loads(model)
        self._several = processes.world_size > 1
        self._alike = Alike(engine.optimizer, self._loads, processes)
        self._guarded = guard(engine.optimizer) if engine.optimizer is not None else {}
        self._aside = Aside(engine.model)
        self._overflowed = False
        self._tripwire = None if engine.whole_gradients else Tripwire(engine.model, backend.name)
        self._guards = self._tripwire is not None or self.scaler is not None

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that was handed to ``prepare``; its ``param_groups`` are live under every strategy.

        What a schedule or the user writes into a group holds from the next step on. ``step``, ``zero_grad`` and the
        like are the session's.

        Raises:
            StateError: the session has none: it is one for evaluation.
        """
        if self._engine.optimizer is None:
            raise StateError("this session has no optimizer: prepare was given None, so it only evaluates")
        return self._engine.optimizer

    @property
    def rank(self) -> int:
        """This process's place among all that train together, from 0. Not collective."""
        return self._processes.rank

    @property
    def world_size(self) -> int:
        """How many processes train together. Not collective."""
        return self._processes.world_size

    @property
    def grad_norm(self) -> float:
        """The global L2 norm of the last step's averaged gradient before clipping, equal on all ranks. Not collective.

        Raises:
            StateError: the strategy asks neither for clipping nor for the norm, or there was no step yet.
        """
        if self._grad_norm is None:
            if self.strategy.max_grad_norm is None and not self.strategy.track_grad_norm:
                raise StateError("the gradient norm isn't computed: ask for it with Strategy(track_grad_norm=True)")
            raise StateError("there is no gradient norm before the first step")
        return self._grad_norm

    def backward(self, loss: Tensor) -> None:
        """Back-propagate one micro-batch.

        ``loss`` is the mean over this rank's micro-batch, a scalar; it isn't rescaled. The gradients of a window of
        ``strategy.accumulate`` calls are averaged over calls and ranks. Within :meth:`windows` with weights, ``loss``
        is the sum over the micro-batch.

        Raises:
            InputError: the loss is no scalar or has no gradient.
            StateError: the window is complete and waits for ``step``.
        """
        if self._closed or self._failed:
            self._require_open()
        count = self._count
        if count.micro == count.expected:
            raise StateError(
                f"backward past the window: {count.expected} of {count.expected} micro-batches are in; "
                "call session.step() after each session.backward(loss)"
            )
        loss = checked_loss(loss)
        # On CPU nothing waits for the number, and it is quicker to have than another tensor.
        value = loss.item() if loss.is_cpu else loss.detach()
        factor, seed = count.share * self._engine.loss_scale, self._seed
        if seed is None or factor != self._factor or seed.dtype is not loss.dtype or seed.device != loss.device:
            seed = self._seed = torch.tensor(factor, dtype=loss.dtype, device=loss.device)
            self._factor = factor
        self._losses.append(value)
        # 0 x loss: one that isn't finite makes every gradient NaN, so that all ranks see it without a collective.
        gradient = seed if isinstance(value, float) and isfinite(value) else seed + 0 * value
        aside = self._aside.take() if len(open_asides) > 1 else None
        try:
            self._engine.backward(loss, gradient, last=count.micro + 1 == count.passes)
        except BaseException as error:
            self._failed = f"backward failed with {type(error).__name__}, and left part of a gradient behind"
            raise
        finally:
            if aside is not None:
                self._aside.give_back(aside)
        count.micro += 1
        if count.micro == count.real:
            count.share = 0.0
        if self._guards and count.micro == count.passes:
            self._complete()

    def _backward_part(self, loss: Tensor, *, last: bool) -> None:
        """Do as :meth:`backward` in a window whose length only its ``last`` micro-batch tells.

        ``loss`` is this micro-batch's part of the window's: divided by what the window is averaged over already.
        """
        if self._count.is_full():
            raise StateError(
                "backward came again after the window's last micro-batch, whose gradients are averaged already: add "
                "the losses of a micro-batch up, and go back through them once"
            )
        self._count.extend(last=last)
        self.backward(loss)

    def _drop_window(self) -> None:
        """Drop the gradients of a window that was left in its midst, on all ranks. Collective."""
        self._require_open()
        disarm(self._tripwire)
        self._engine.restart()
        self._count.restart()
        self._overflowed = False
        self._losses.clear()

    def step(self) -> bool:
        """Update the weights if the window is complete, and return whether they moved.

        In mid-window it does nothing and returns False.

        A step whose gradient isn't finite on any rank is left out on all; ``step_was_skipped`` tells.

        Raises:
            StateError: there was no ``backward`` since the last step.
            MismatchError: the optimizer's groups have other settings on another rank, or it loaded other weights since
                ``prepare``; nothing moved.
            NonFiniteError: a loss or gradient of any rank isn't finite, on every rank; nothing moved. With
                ``on_nonfinite="skip"``, and in fp16 while the loss scale can fall, the step returns False instead.
        """
        if self._closed or self._failed:
            self._require_open()
        count = self._count
        if count.micro < count.expected:
            if count.micro == 0:
                raise StateError("step without backward: call session.backward(loss) first")
            if count.exhausted:
                raise StateError(
                    f"{count.micro} of this window's {count.expected} micro-batches went through session.backward: the "
                    "other ranks wait for the rest; hand over 0.0 * loss for one that is to count nothing"
                )
            return False
        if count.micro < count.passes:
            self._fill_up()
        if self._overflowed:
            self._overflowed = False
            spoil(self._trained())
        if self._several or self._alike.came:
            self._alike.check(self._engine.loss_scale)
        disarm(self._tripwire)
        try:
            update = self._engine.step()
        except BaseException as error:
            self._failed = f"a step failed with {type(error).__name__}"
            raise
        count.micro = 0
        if count.in_window and self._windows is not None:
            count.restart()
            self._windows.completed()
        self._grad_norm = update.grad_norm
        self.step_was_skipped = not update.applied
        if self._buffers is not None:
            self._buffers.synchronize()
        answered = False
        if self.scaler is not None:
            answered = self.scaler.update(applied=update.applied)
            self._engine.loss_scale = self.scaler.scale
        if not update.applied:
            self.skipped_steps += 1
            losses, step = [float(value) for value in self._losses], self.steps + self.skipped_steps
            self._losses.clear()
            report_nonfinite(step, losses, self.backend.name, self.strategy, self.scaler, self._processes, answered)
            return False
        self._losses.clear()
        self.steps += 1
        # Schedules of torch warn unless the optimizer's own step has run, and here the backend's may have.
        self._engine.optimizer._opt_called = True  # type: ignore[union-attr]
        return True

    def windows(
        self, loader: Iterable[B], *, weight: Weight[B] | None = None, uneven: Literal["use", "refuse"] = "use"
    ) -> Windows[B]:
        """Return an iterator over a loader's accumulation windows, each of up to ``strategy.accumulate`` micro-batches.

        Each micro-batch of a window counts the same, however many each rank has; a rank whose loader has ended takes
        part until all have. ``uneven="refuse"`` raises instead. With ``weight``, a function from a micro-batch to a
        number such as its tokens, ``backward`` takes *sums* of losses, and a step is that of the sum of all losses over
        the sum of all weights, of all ranks. To iterate is collective, and draws a window's batches before it is used.

        Raises:
            InputError: ``uneven`` is neither of the two.
            StateError: the session only evaluates.
        """
        self._require_open()
        _ = self.optimizer  # raises where there is none
        if uneven not in ("use", "refuse"):
            raise InputError(f'uneven is "use" or "refuse", not {uneven!r}')
        carried, self._progress = self._progress, None
        if self._windows is not None:
            carried = self._windows.carried()
        plan = (self.strategy.accumulate, self.backend.name, self._engine, self._processes, self._device)
        training = Training(*plan, self._count, self._taken)
        self._windows = Windows(loader, weight, uneven, training, carried)
        return self._windows

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations run in the strategy's precision; in fp32 without effect.

        For what is computed outside of the module's forward, which has it. Not collective.
        """
        return autocast(self.strategy.precision, self._device)

    def _require_usable(self) -> None:
        if self._closed:
            raise StateError("this session is closed: prepare the model again")

    def _require_open(self) -> None:
        self._require_usable()
        if self._failed:
            raise StateError(f"{self._failed}: go on from a checkpoint with session.load, or prepare the model again")

    def _taken(self) -> None:
        """Take note that all micro-batches of a window were taken; let other ranks have the passes that they need."""
        count = self._count
        if not count.in_window:
            # Its step was made before its iteration ended: what stands here is of the next window.
            return
        count.exhausted = True
        if count.expected <= count.micro < count.passes:
            self._fill_up()

    def _complete(self) -> None:
        """Guard the averaged gradients of a window, all of whose backward passes are in."""
        if self._tripwire is not None:
            self._tripwire.arm()
        elif self.scaler is not None:
            # Here, since the user may clamp what has overflowed before the step looks.
            self._overflowed = not all_finite(self._trained())

    def _trained(self) -> list[Tensor]:
        return gradients(value for group in self.optimizer.param_groups for value in group["params"])

    def _fill_up(self) -> None:
        """Run the backward passes that other ranks have in this window and this one lacks, with a loss of 0."""
        try:
            self._count.fill_up(self._engine, self._device)
        except BaseException as error:
            self._failed = f"backward failed with {type(error).__name__}, and left part of a gradient behind"
            raise
        self._complete()

    def _require_between_windows(self, what: str) -> None:
        self._require_open()
        if not self._count.is_between():
            raise StateError(
                f"{what} in mid-window would lose the gradients of {self._count.micro} of {self._count.expected} "
                "micro-batches: call it after session.step() has returned True"
            )
