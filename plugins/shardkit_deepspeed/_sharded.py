"""What the engines of stages 1 to 3 share: a window of backward passes, and a step over what a rank holds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import UnsupportedError
from shardkit.gradients import settled, unscale
from shardkit_deepspeed._fragments import Fragment, Fragments, carried_state
from shardkit_deepspeed._half import Half
from shardkit_deepspeed._order import Order

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class ShardedEngine(Engine):
    """The user's module and optimizer over one of DeepSpeed's ZeRO optimizers.

    DeepSpeed lays out the shards, communicates, clips and calls the optimizer. When a gradient goes to be averaged is
    decided here and not by DeepSpeed's hooks, which trust that the backward passes of all ranks are alike.
    """

    stage: int
    whole_gradients = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        library: Any,
        fragments: Fragments,
        strategy: Strategy,
        half: Half | None,
    ) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        self._library = library
        self._zero = library.optimizer
        self._fragments = fragments
        self._half = half
        self._groups = list(zip(fragments.twin.param_groups, optimizer.param_groups, strict=True))
        self._want_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._world_size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._params: list[nn.Parameter] = []
        self._homes: list[int] = []
        self._find_parameters()
        self._device = self._params[0].device
        trained = {id(value) for value in self._params}
        listed = {id(value) for group in optimizer.param_groups for value in group["params"]}
        # Their gradients are nobody's: no optimizer holds these parameters.
        self._others = [value for value in model.parameters() if id(value) not in listed]
        self._frozen = [
            value
            for value in model.parameters()
            if id(value) in listed and id(value) not in trained and _elements(value)
        ]
        self._seen = bytearray(len(self._params))
        self._settled: tuple[float, bool] | None = None
        self._order = Order(len(self._params), self._device)
        self._running = False
        for hook in self._zero._grad_acc_hooks:
            hook.remove()
        self._zero._grad_acc_hooks.clear()
        self._handles: list[Any] = []
        self._attach()
        self._carry_state()
        if half is not None:
            half.fill(fragments, self._params)
            half.attach()
            fragments.before = self._take_over
            # The norm that is given to DeepSpeed tells of overflow too, without another pass and collective.
            self._zero.check_overflow = _nothing

    # What differs among the stages.

    @abstractmethod
    def _find_parameters(self) -> None:
        """Fill ``_params`` with those that DeepSpeed trains, and ``_homes`` with the number of the group of each."""

    @abstractmethod
    def _attach(self) -> None:
        """Tell ``_fragments`` what of each parameter lies where in DeepSpeed's flat tensors."""

    @abstractmethod
    def _low_precision(self, master: Tensor) -> Tensor:
        """Return this rank's part of the weights that a flat float32 tensor is the master of."""

    @abstractmethod
    def _gradient_pieces(self) -> list[tuple[Fragment, Tensor]]:
        """Return the averaged gradient of each of this rank's fragments, between the last backward and step."""

    @abstractmethod
    def _local_gradients(self) -> list[Tensor]:
        """Return the averaged gradients that this rank holds, in pieces of any kind."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Forget the gradients of a window in progress."""

    # The window.

    def _hook(self, index: int) -> Callable[[Any], None]:
        name = self._names[id(self._params[index])]

        def arrived(value: Any) -> None:
            if not self._running:
                return
            if value.grad.is_sparse:
                # Other ranks may have a dense one, or none.
                value.grad = value.grad.to_dense()
            self._seen[index] = 1
            if not self._order.arrive(index, self._release):
                self._arrived_again(index, name)

        return arrived

    @abstractmethod
    def _release(self, index: int) -> None:
        """Start to average a parameter's gradient: its turn in the order has come."""

    @abstractmethod
    def _arrived_again(self, index: int, name: str) -> None:
        """Meet a second gradient of one parameter in one backward pass."""

    def _unscale(self) -> None:
        if self.loss_scale != 1.0:
            unscale(self._local_gradients(), self.loss_scale)

    def _zeros(self, index: int) -> None:
        """Give a parameter that has no gradient one of zeros, to average with the other ranks'."""
        value = self._params[index]
        value.grad = torch.zeros_like(value)

    def _refuse_thawed(self) -> None:
        for value in self._frozen:
            if value.grad is not None:
                value.grad = None
                raise UnsupportedError(
                    f"backend 'deepspeed' at stage {self.stage} can't train {self._names[id(value)]!r}: it was frozen "
                    "when the session was prepared, so that no rank holds a shard for it. Freeze it after prepare, or "
                    "close the session and prepare again, or use deepspeed:stage=0 or ddp"
                )

    # The step.

    def _settle(self) -> float:
        """Return the global norm of the averaged gradient, and learn which parameters have none. Collective, once."""
        if self._settled is not None:
            return self._settled[0]
        some_absent = 0 in self._seen
        norm, self._fragments.absent = settled(self._local_gradients(), self._seen, some_absent, self._device)
        self._settled = (norm, True)
        return norm

    def _norm_tensor(self) -> Tensor:
        return torch.tensor(self._settle(), dtype=torch.float32, device=self._zero.device)

    def _clip(self, gradients: list[Tensor]) -> None:
        """Scale gradients as DeepSpeed does where their global norm is over its bound."""
        if self._zero.clip_grad > 0.0:
            over = torch.clamp((self._norm_tensor() + 1e-6) / self._zero.clip_grad, min=1.0)
            for gradient in gradients:
                gradient.mul_(1.0 / over)

    def step(self) -> Update:
        for own, live in self._groups:
            parameters = own["params"]
            own.update(live)
            own["params"] = parameters
        norm = self._settle()
        moves = math.isfinite(norm)
        # The user hung them on the optimizer whose step this is.
        for hook in self.optimizer._optimizer_step_pre_hooks.values() if moves else ():
            hook(self.optimizer, (), {})
        applied = self._apply(moves)
        for hook in self.optimizer._optimizer_step_post_hooks.values() if applied else ():
            hook(self.optimizer, (), {})
        self._settled = None
        self._seen = bytearray(len(self._params))
        for value in self._others:
            value.grad = None
        return Update(applied, norm if self._want_norm else None)

    def _apply(self, finite: bool) -> bool:
        """Clip, update the weights and drop the gradients; return whether the weights moved."""
        self._zero.step()
        return not self._zero.overflow

    # What is whole.

    def full_gradients(self) -> dict[str, Tensor]:
        self._settle()
        whole: dict[str, Tensor] = {}
        pieces: dict[int, list[tuple[Fragment, Tensor]]] = {}
        for fragment, gradient in self._gradient_pieces():
            pieces.setdefault(fragment.at, []).append((fragment, gradient))
        for index, value in enumerate(self._params):
            if index in self._fragments.absent:
                continue
            shape = _shape(value)
            flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=self._device)
            for fragment, gradient in pieces.get(index, ()):
                flat.narrow(0, fragment.start, fragment.size).copy_(gradient)
            if self._world_size > 1:
                # Zeros from those who hold no part: the sum is exact.
                dist.all_reduce(flat)
            whole[self._names[id(value)]] = flat.view(shape).cpu()
        # In the module's order, as every backend gives them.
        return {name: whole[name] for name in self._names.values() if name in whole}

    def gradient_shards(self) -> list[Shard]:
        self._settle()
        names = [self._names[id(value)] for value in self._params]
        return [
            Shard(names[fragment.at], fragment.start, gradient)
            for fragment, gradient in self._gradient_pieces()
            if fragment.at not in self._fragments.absent
        ]

    # Half-precision weights.

    @torch.no_grad()
    def _take_over(self, master: Tensor) -> None:
        """Take into a master what was written into its low-precision weights since it last gave them their values."""
        held = self._low_precision(master)
        # Masters in host memory of weights on a GPU: to look would cost a copy in each step.
        if held.device != master.device:
            return
        for own, part in zip(master.detach().split(_PIECE), held.split(_PIECE), strict=True):
            rounded = own.to(part.dtype)
            if not _same_bits(rounded, part):
                own.copy_(torch.where(rounded == part, own, part.float()))

    def _take_all_over(self) -> None:
        if self._half is not None:
            for master in self._fragments.flats():
                self._take_over(master)

    @torch.no_grad()
    def _whole_master(self, index: int) -> Tensor:
        """Return a parameter in float32, put together from all ranks. Collective."""
        shape = _shape(self._params[index])
        flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=self._device)
        for fragment, view in self._fragments.of(index):
            flat.narrow(0, fragment.start, fragment.size).copy_(view)
        if self._world_size > 1:
            # Zeros from those who hold no part: the sum is exact.
            dist.all_reduce(flat)
        return flat.view(shape)

    # State.

    def _carry_state(self) -> None:
        """Take over the state that the user's optimizer holds already: Adagrad's, or that of earlier training."""
        twin = self._fragments.twin
        for fragment, view in self._fragments.fragments():
            value = self._params[fragment.at]
            entry = self.optimizer.state.get(value)
            if entry:
                twin.state[view] = carried_state(entry, _shape(value), fragment, self._names[id(value)])
        # One copy of it is enough; the session's optimizer no longer steps.
        self.optimizer.state.clear()

    @property
    def stepper(self) -> Optimizer:
        return self._fragments.twin

    def state_shards(self) -> list[Shard]:
        return [
            Shard(self._names[id(self._params[fragment.at])], fragment.start, view)
            for fragment, view in self._fragments.fragments()
        ]

    def _master_shards(self) -> list[Shard]:
        """Return the shards of the trained weights, as float32 has them."""
        self._take_all_over()
        return [Shard(name, start, view.detach()) for name, start, view, _ in self.state_shards()]

    def state_dict(self) -> dict[str, Any]:
        # In which order gradients travel decides which share a bucket, and so in which order they are added up.
        learned = self._order.learned
        numbers = {at: number for number, at in enumerate(self._by_name())}
        return {"order": None if learned is None else [numbers[at] for at in learned]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        order = state["order"]
        if order is not None:
            places = dict(enumerate(self._by_name()))
            # Others where other parameters were frozen at prepare.
            order = [places.pop(number) for number in order if number in places] + list(places.values())
        self._order.learn(order)

    def _by_name(self) -> list[int]:
        """Return the indices of the parameters in the order of their names."""
        return sorted(range(len(self._params)), key=lambda at: self._names[id(self._params[at])])

    def restart(self) -> None:
        self._drop_gradients()
        self._order.restart()
        self._settled = None
        self._seen = bytearray(len(self._params))


_PIECE = 2**18
"""How many elements are compared at a time, for the memory of it."""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of 2 bytes an element are the same, in a third of the time of comparing numbers."""
    aligned = other.numel() % 4 == other.storage_offset() % 4 == one.storage_offset() % 4 == 0
    wide = torch.int64 if aligned else torch.int16
    return torch.equal(one.view(wide), other.view(wide))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what of DeepSpeed isn't needed."""


def _shape(value: Tensor) -> torch.Size:
    """Return a parameter's own shape, also while stage 3 has it sharded."""
    shape = getattr(value, "ds_shape", value.shape)
    return torch.Size(shape)


def _elements(value: Tensor) -> int:
    return math.prod(_shape(value))
