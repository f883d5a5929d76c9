"""The seam: an accelerator whose model, backward pass and optimizer are those of a session."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Self

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DummyOptim
from torch import Tensor, nn

import shardkit
from shardkit.errors import InputError, NonFiniteError, StateError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Held:
    """A session as its model keeps it, so that they go together; a copy of the model has none."""

    def __init__(self, session: shardkit.Session | None = None) -> None:
        self.session = session

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


_SESSION = "_shardkit_session"
"""The attribute of a model that holds its session: another Trainer may go on with the same model."""

_WHOLE = "ddp"
"""The backend that evaluates a model which isn't trained: under any of them it is whole on each rank."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An accelerator over a session. What it overrides is all that the Trainer trains with."""

    strategy: shardkit.Strategy
    session: shardkit.Session | None
    """The session in which the model trains; None before the training."""
    _module: nn.Module
    """The module that trains in it."""

    @classmethod
    def over(cls, accelerator: accelerate.Accelerator, strategy: shardkit.Strategy) -> Self:
        """Have an accelerator that was just made train under a strategy."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.strategy, accelerator.session = strategy, None
        return accelerator

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Open the session over a model and its optimizer; prepare anything else, such as a loader, as ever."""
        if not any(isinstance(value, nn.Module) for value in objects):
            return super().prepare(*objects, device_placement=device_placement)
        if len(objects) != 2 or not isinstance(objects[1], torch.optim.Optimizer | DummyOptim):
            raise UnsupportedError(
                "under a strategy a model is prepared together with its optimizer, and nothing else: "
                f"got {', '.join(type(value).__name__ for value in objects)}"
            )
        model, optimizer = objects
        held = getattr(optimizer, "optimizer", optimizer)
        if self.session is None or not self._goes_on(model, held):
            self.end()
            close(model)
            called = self._compiled(model)
            session = shardkit.prepare(called, None if isinstance(held, DummyOptim) else held, self.strategy)
            model.__dict__[_SESSION] = _Held(session)
            self.session, self._module = session, model
        prepared = SessionOptimizer(self.session)
        self._models.append(self.session.model)
        self._optimizers.append(prepared)
        return self.session.model, prepared

    def end(self) -> None:
        """End the session of an earlier training, unless another Trainer has taken its model over. Collective."""
        if self.session is not None and _session_of(self._module) is self.session:
            close(self._module)
        self.session = None

    def _goes_on(self, model: nn.Module, optimizer: Any) -> bool:
        """Return whether the open session trains the model with this optimizer already: train was called again."""
        session = self.session
        assert session is not None
        if session.optimizer is not optimizer or self._module is not model:
            return False
        if session._closed or _session_of(model) is not session:
            raise StateError(
                "this Trainer's session was closed since its last train(), by hand or by another Trainer over the "
                "model, and its optimizer's state went with it: make a new Trainer over the model"
            )
        if not session._count.is_between() and not session._failed:
            # A training that was stopped in mid-window, or broken off by an error, left gradients behind. Of a session
            # that failed, they go with what a checkpoint brings; without one, the next backward is refused.
            session._drop_window()
        return True

    def end_training(self) -> None:
        """Give the model back, with whole weights, and end the process group. Collective."""
        self.end()
        super().end_training()

    def _compiled(self, model: nn.Module) -> nn.Module:
        plugin = self.state.dynamo_plugin
        if plugin.backend == accelerate.utils.DynamoBackend.NO:
            return model
        compiled: Any = torch.compile(model, **plugin.to_kwargs())
        return compiled  # type: ignore[no-any-return]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model for evaluation before any training: whole on each rank, in the strategy's precision."""
        if not evaluation_mode:
            raise UnsupportedError("under a strategy a model is prepared together with its optimizer")
        if self.session is not None and _session_of(model) is self.session:
            # A train() that failed at its begin had the accelerator forget it.
            self._models.append(self.session.model)
            return self.session.model
        close(model)
        model.to(self.device)
        if self.strategy.precision != "fp32":
            plain = shardkit.Strategy(_WHOLE, precision=self.strategy.precision)
            model.__dict__[_SESSION] = _Held(shardkit.prepare(model, None, plain))
        self._models.append(model)
        return model

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Back-propagate a micro-batch, whose loss the Trainer has divided by its window's length or tokens."""
        if kwargs:
            raise UnsupportedError(f"backward takes no {', '.join(kwargs)} under strategy {str(self.strategy)!r}")
        self._trained._backward_part(loss, last=self.sync_gradients)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2) -> Tensor:
        """Return a tensor that the optimizer's step fills with the norm before clipping; the step clips."""
        most = math.inf if self.strategy.max_grad_norm is None else self.strategy.max_grad_norm
        if norm_type != 2 or max_norm != most:
            raise UnsupportedError(
                f"the strategy clips at an L2 norm of {most:g}, and was asked for {max_norm:g} in the norm "
                f"{norm_type}: set --max_grad_norm"
            )
        prepared: SessionOptimizer = self._optimizers[-1]
        prepared.norm = torch.zeros(())
        return prepared.norm

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect: the session knows which pass is a window's last."""
        return nullcontext()

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        raise UnsupportedError("gradients aren't whole on each rank under every strategy: clip with --max_grad_norm")

    def save_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("the accelerator doesn't hold the state: trainer.session.save writes a checkpoint")

    def load_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("the accelerator doesn't hold the state: trainer.session.load reads a checkpoint")

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole weights in full precision, on every rank."""
        return self._trained.full_weights()

    @property
    def _trained(self) -> shardkit.Session:
        if self.session is None:
            raise StateError("there is no session before Trainer.train()")
        return self.session


class SessionOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The session's optimizer as the Trainer, its schedule and its callbacks see it: its groups are live."""

    def __init__(self, session: shardkit.Session) -> None:
        super().__init__(session.optimizer, device_placement=False)
        self.session = session
        self.norm: Tensor | None = None
        """What the next step fills with the norm of its gradient before clipping."""

    def step(self, closure: None = None) -> None:
        """Clip and step, and take note of the norm.

        Raises:
            InputError: a closure is given.
            StateError: the window's last micro-batch wasn't given to the accelerator's ``backward``.
        """
        if closure is not None:
            raise InputError("an optimizer's closure would run the model again within its step: it isn't supported")
        if not self.session._count.is_full():
            raise StateError(
                "the window's last micro-batch didn't come to accelerator.backward, and other ranks wait for it: hand "
                "over 0.0 * loss for one that is to count nothing"
            )
        try:
            self.session.step()
        except NonFiniteError as error:
            backend = self.session.strategy.backend
            error.add_note(f'On the Trainer that is --strategy "{backend}:on_nonfinite=skip".')
            raise
        if self.norm is not None:
            self.norm.fill_(self.session.grad_norm)
            self.norm = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the session drops the gradients with each step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out for an overflow in fp16."""
        return self.session.step_was_skipped


def _session_of(model: nn.Module) -> shardkit.Session | None:
    held: _Held | None = model.__dict__.get(_SESSION)
    return None if held is None else held.session


def is_open(model: nn.Module) -> bool:
    """Return whether the model trains, or is evaluated, in a session."""
    return _session_of(model) is not None


def close(model: nn.Module) -> None:
    """End the session of a model, if one is open; the model is whole again. Collective."""
    session = _session_of(model)
    model.__dict__.pop(_SESSION, None)
    if session is not None:
        session.close()
