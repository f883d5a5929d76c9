"""What an engine holds of a model beside its activations: what a plugin tells the planner."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class ParameterSize(NamedTuple):
    """A parameter of the model, without its values."""

    name: str
    """As in ``named_parameters`` of the module."""
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    trainable: bool
    updated: bool
    """Whether the optimizer holds it."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class ModelSize:
    """The model that is to be trained, and where: ``parameters`` in the module's order, each once, ``world_size``
    ranks, and the kind of ``device``."""

    parameters: tuple[ParameterSize, ...]
    world_size: int
    device: str = "cpu"


class Stepped(NamedTuple):
    """A tensor that the optimizer updates on the fullest rank, of float32."""

    shape: tuple[int, ...]
    like: str
    """The name of a parameter in it, whose group it is updated with."""


@dataclass
class Held:
    """Bytes that a rank holds by kind. The state of the optimizer is known of what it steps, and isn't counted here.

    ``parameters`` are weights, whole or in part, with gathered ones and copies in another precision; ``gradients``
    those that were added up; ``optimizer`` master weights and what else is the update's alone; ``buffers`` the buckets
    and working memory of the backend and its communication.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass
class Footprint(ABC):
    """What the fullest rank holds, in bytes, while one window passes: a simulation that the planner leads through it.

    The planner knows of the model, the loss and the optimizer by running them on tensors without memory. It calls the
    methods in the order of a window in the midst of training, not the first, and reads ``held`` and ``host`` after
    each. A method returns the most that is held in its course beyond that, before or after; it is gone at its end.

    ``held`` is on the device that computes; ``host`` in host memory, for what is offloaded, which is the same memory
    where the device is the CPU. ``offloaded_state`` says that the optimizer's state and its step are in host memory.
    ``weights`` is the precision that the engine casts the module's weights and inputs to, None where it leaves them.
    """

    model: ModelSize
    held: Held = field(default_factory=Held, init=False)
    host: Held = field(default_factory=Held, init=False)
    offloaded_state: bool = field(default=False, init=False)
    weights: Literal["bf16", "fp16"] | None = field(default=None, init=False)

    @abstractmethod
    def stepped(self) -> Sequence[Stepped]:
        """Return what the optimizer updates on this rank, in the order of its step."""

    def prepare(self) -> int:
        """Build the engine of a model that is whole on the rank; leave ``held`` as it is between two windows."""
        return 0

    def forward(self, names: Sequence[str]) -> int:
        """A module is about to run that has these parameters of its own; the one before is done."""
        return 0

    def backward(self, names: Sequence[str]) -> int:
        """Gradients of these parameters, a module's own, are about to be computed; those of the one before are done."""
        return 0

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        """The gradient of a parameter has been added up, in memory of so many bytes that is counted here from now on.

        The planner counted them among the activations till then. They are none where the gradient was added to one of
        an earlier micro-batch. ``last`` is whether the micro-batch is the window's last.
        """
        self.held.gradients += nbytes
        return 0

    @abstractmethod
    def step(self) -> int:
        """Average what is left to average, clip, update the weights and drop the gradients.

        What the optimizer's own step takes for itself comes on top of what is held before this, less the activations.
        """
