"""The engine: what a backend's plugin writes, and what a session drives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did.

    ``applied`` is false when a gradient was not finite: weights and optimizer state are then as before.
    ``grad_norm`` is the global L2 norm of the averaged gradient before clipping, equal on all ranks; None
    where the strategy asked neither for clipping nor for the norm.
    """

    applied: bool
    grad_norm: float | None = None


class Engine(ABC):
    """One model and its optimizer under one backend.

    The session owns the order of calls: ``backward`` ``accumulate`` times, the last one with ``last=True``, then
    ``step``. All methods are collective: every rank calls them in the same order. The defaults of this class hold for
    a backend that keeps the whole weights on every rank.
    """

    model: nn.Module
    """The module that the user calls, in training and evaluation: the user's own, or a wrapper around it."""

    optimizer: Optimizer | None
    """A torch optimizer whose ``param_groups`` are live: what is written there holds from the next step on."""

    lockstep: Literal["window", "backward", "forward"] = "window"
    """What all ranks must do the same number of times within a window, since it communicates.

    ``"window"``: nothing but the last backward. ``"backward"``: every backward; the session fills in those that a rank
    lacks, with a loss of zero. ``"forward"``: every call of the module and backward; a rank runs a batch once more.
    """

    loss_scale: float = 1.0
    """What the window's losses are multiplied by, beside the window's scale; the session sets it between windows.

    Other than 1 only in precision fp16. The last backward divides the averaged gradients by it, so that ``step`` and
    ``full_gradients`` see them unscaled; :func:`shardkit.gradients.unscale` does that.
    """

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss`` to the window.

        ``loss`` is a scalar with a graph. ``gradient`` is the scalar to start the back-propagation from: it holds what
        the micro-batch counts in its window (1 / accumulate, or by weight) times ``loss_scale``, and is NaN when the
        loss is not finite, so that every rank sees it in the gradients. ``last`` marks the window's last pass, whose
        gradients are averaged over the ranks with all that came before.
        """

    @abstractmethod
    def step(self) -> Update:
        """Clip, update the weights, and drop the gradients.

        Where a gradient of any rank isn't finite, drop the gradients and change nothing else, on every rank.
        """

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """Return the averaged gradients before clipping, by parameter name, whole, on CPU, on every rank.

        Called between ``backward(last=True)`` and ``step``. A parameter without a gradient is left out.
        """

    def full_weights(self) -> dict[str, Tensor]:
        """Return the module's state dict, whole, as copies on CPU, on every rank."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which the module holds its whole weights on every rank, to read, not to write.

        Within it a rank may call the module as often as it likes, whatever the other ranks do.
        """
        return nullcontext()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on exactly: tensors, numbers, strings and containers of them."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave on this rank, and drop the gradients of a window in progress."""

    def close(self) -> None:  # noqa: B027 - to override or not
        """Let go of hooks and buffers; the user's module stays usable on its own, with whole weights."""
