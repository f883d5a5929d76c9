"""The engine: what a backend's plugin writes, and what a session drives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


class Shard(NamedTuple):
    """A run of a parameter's elements that this rank holds, in the order of the whole parameter's memory."""

    name: str
    """The parameter's, as in ``named_parameters`` of the module."""
    start: int
    """The first of its elements."""
    values: Tensor
    """As many elements as the run has, of any shape, on any device; what is written there counts."""
    rounded: bool = False
    """Whether they are kept in a lower precision than the parameter had when it was handed over."""


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
    lacks, with a loss of 0. ``"forward"``: every call of the module and backward; a rank runs a batch once more.
    """

    loss_scale: float = 1.0
    """What the window's losses are multiplied by, beside the window's scale; the session sets it between windows.

    Other than 1 only in precision fp16. The last backward divides the averaged gradients by it, so that ``step`` and
    ``full_gradients`` see them unscaled; :func:`shardkit.gradients.unscale` does that.
    """

    whole_gradients: bool = True
    """Whether ``parameter.grad`` is the whole averaged gradient, the same on every rank, from the window's last
    ``backward`` to ``step``, and what the user changes in it there counts. Where not, the session refuses to show it
    then."""

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

    def gradient_shards(self) -> list[Shard]:
        """Return what this rank holds of the averaged gradients before clipping, and no other rank returns.

        Called where ``full_gradients`` is, and only if the gradients aren't whole. A parameter without a gradient is
        left out on every rank. To override where that is cheaper than to give rank 0 the whole, as here.
        """
        import torch.distributed as dist

        whole = self.full_gradients()
        return [Shard(name, 0, value) for name, value in whole.items()] if dist.get_rank() == 0 else []

    def full_weights(self) -> dict[str, Tensor]:
        """Return the module's state dict, whole, as copies on CPU, on every rank."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which the module holds its whole weights on every rank, to read, not to write.

        Within it a rank may call the module as often as it likes, whatever the other ranks do.
        """
        return nullcontext()

    # What a checkpoint asks for. It reads and writes what the shards hold in place, between windows.

    @property
    def stepper(self) -> Optimizer | None:
        """The optimizer whose ``state`` holds the entries of :meth:`state_shards`, if it isn't the user's own."""
        return self.optimizer

    def weight_shards(self) -> list[Shard]:
        """Return what this rank holds of the parameters; together the ranks hold every element, some or all of them
        more than once."""
        return [Shard(name, 0, value.detach()) for name, value in self.model.named_parameters()]

    def state_shards(self) -> list[Shard]:
        """Return for what of the parameters this rank holds the optimizer's state.

        ``values`` is the tensor under which ``stepper.state`` has it.
        """
        names = {id(value): name for name, value in self.model.named_parameters()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [Shard(names[id(value)], 0, value) for group in groups for value in group["params"]]

    def restart(self) -> None:
        """Drop the gradients of a window in progress, and what a backward that failed left behind, before a load."""
        for value in self.model.parameters():
            value.grad = None

    def loaded(self) -> None:  # noqa: B027 - to override or not
        """Follow what a load has written into the shards: copies of them, such as weights in a lower precision."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs beside all that to go on to the last bit, under the same strategy with as many
        ranks: numbers, strings, small tensors and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - to override or not
        """Take back what ``state_dict`` gave on this rank."""

    def close(self) -> None:  # noqa: B027 - to override or not
        """Let go of hooks and buffers; the user's module stays usable on its own, with whole weights."""
