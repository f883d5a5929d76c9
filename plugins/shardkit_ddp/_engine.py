"""The engine over DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from shardkit import Engine, Strategy, Update
from shardkit.errors import UnsupportedError
from shardkit.gradients import all_finite, gradients, total_norm, unscale
from shardkit_ddp._average import average

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_ddp._options import DDPOptions


@final
class DDPEngine(Engine):
    """The user's module and optimizer, and torch's reducer between them.

    The user calls the module itself and never the wrapper: the reducer is told of a backward pass when the pass
    begins, with its loss. So it finds unused parameters in the very graph that is back-propagated, whatever the module
    returned and however often it was called, and a micro-batch that isn't the window's last needs no ``no_sync``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: DDPOptions) -> None:
        self.model = model
        self.optimizer: Optimizer = optimizer
        # Kept here: once the session is open, it guards the optimizer's own.
        self._optimizer_step = optimizer.step
        self._parameters = list(model.parameters())
        self._max_norm = strategy.max_grad_norm
        self._want_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._options = options
        self._distributed = dist.get_world_size() > 1
        self._frozen: list[Tensor] = []
        self._ddp: DistributedDataParallel | None = None
        # The first window is averaged after the pass. It shows whether gradients are sparse, or come from a backward
        # within the backward, which the reducer can't follow on some ranks and must know on all.
        self._overlap = False
        self._may_overlap = options.overlap
        self._midway = False

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        if self._distributed:
            self._backward_on_ranks(loss, gradient, last=last)
        else:
            loss.backward(gradient)
        if last and self.loss_scale != 1.0:
            unscale(gradients(self._parameters), self.loss_scale)

    def _backward_on_ranks(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        overlap = last and self._overlap
        first = last and self._may_overlap and not overlap
        passes = _Passes(loss, self._parameters) if first else None
        if overlap:
            ddp = self._wrapped()
            if ddp is not None:
                loss = _anchored(loss, self._parameters)
                _expect(ddp.reducer, loss)
        self._midway = True
        try:
            loss.backward(gradient)
        except RuntimeError as error:
            if "SparseTensorImpl" in str(error):
                raise UnsupportedError(
                    "backend 'ddp' got a sparse gradient after a first window without any, when its reducer no longer "
                    "expects one: use 'ddp:overlap=false', which averages gradients of any kind after the pass"
                ) from error
            if "mark a variable ready only once" not in str(error):
                raise
            raise UnsupportedError(
                "backend 'ddp' got the gradient of a parameter twice in one backward pass, as gradient checkpointing "
                "with use_reentrant=True gives it: checkpoint with use_reentrant=False, or use 'ddp:overlap=false', "
                "which averages the gradients after the pass"
            ) from error
        self._midway = False
        if last and not overlap:
            special = average(self._parameters, special=passes is not None and passes.nested())
            self._may_overlap = self._may_overlap and not special
            self._overlap = self._may_overlap

    def _wrapped(self) -> DistributedDataParallel | None:
        """Return the reducer's owner over those parameters that are trainable; None without any. Collective."""
        if self._ddp is None or any(value.requires_grad for value in self._frozen):
            # The reducer knows only those parameters that were trainable when it was built.
            self._frozen = [value for value in self._parameters if not value.requires_grad]
            self._ddp = _wrap(self.model, self._options)
        return self._ddp

    def step(self) -> Update:
        trained = gradients([parameter for group in self.optimizer.param_groups for parameter in group["params"]])
        norm = None
        # The reducer has averaged the gradients: what this rank sees, all see.
        if self._want_norm:
            total = total_norm(trained)
            norm = total.item()
            applied = norm - norm == 0.0
            if applied and self._max_norm is not None:
                clip_grads_with_norm_(trained_parameters(self.optimizer), self._max_norm, total)
        else:
            applied = all_finite(trained)
        if applied:
            self._optimizer_step()
        for parameter in self._parameters:
            parameter.grad = None
        return Update(applied, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        return {
            name: value.grad.detach().to_dense().cpu().clone()
            for name, value in self.model.named_parameters()
            if value.grad is not None
        }

    def restart(self) -> None:
        super().restart()
        if self._midway and self._ddp is not None:
            # A backward failed, and left the reducer in the middle of its work.
            self._ddp = _wrap(self.model, self._options)
            self._midway = False

    def state_dict(self) -> dict[str, Any]:
        # How gradients are averaged decides in which order they are added up: whether by the reducer, and with what
        # beside them in its buckets, which keep their place for a parameter that is frozen later.
        frozen = {id(value) for value in self._frozen}
        reduced = [name for name, value in self.model.named_parameters() if id(value) not in frozen]
        return {
            "overlap": self._overlap,
            "may_overlap": self._may_overlap,
            "reduced": None if self._ddp is None else reduced,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._overlap, self._may_overlap = state["overlap"], state["may_overlap"]
        self._ddp, self._frozen = None, []
        if state["reduced"] is not None and self._distributed:
            reduced = set(state["reduced"])
            trainable = [value.requires_grad for value in self._parameters]
            try:
                for name, value in self.model.named_parameters():
                    value.requires_grad_(name in reduced)
                self._wrapped()
            finally:
                for value, flag in zip(self._parameters, trainable, strict=True):
                    value.requires_grad_(flag)

    def close(self) -> None:
        for parameter in self._parameters:
            # Those of a window in progress are views of the reducer's buckets.
            parameter.grad = None
        # The reducer's hooks on the parameters go with it.
        self._ddp = None
        self._distributed = self._overlap = False


class _Passes:
    """Notices, in one backward from a loss, whether gradients come from another one within it."""

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        self._ids: set[int] = set()
        self._handles = [loss.register_hook(self._note)]
        self._handles += [
            value.register_post_accumulate_grad_hook(self._note) for value in parameters if value.requires_grad
        ]

    def nested(self) -> bool:
        """Return whether there was one, once the backward is over."""
        for handle in self._handles:
            handle.remove()
        return len(self._ids) > 1

    def _note(self, _: Tensor) -> None:
        self._ids.add(torch._C._current_graph_task_id())


def _wrap(model: nn.Module, options: DDPOptions) -> DistributedDataParallel | None:
    if not any(value.requires_grad for value in model.parameters()):
        return None
    return DistributedDataParallel(
        model,
        init_sync=False,  # the core has broadcast the weights, and keeps buffers equal
        find_unused_parameters=True,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )


def _anchored(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the loss with a parameter in its graph that gets no gradient from there.

    The reducer begins with the first parameter that back-propagation reaches. A loss that depends on none, where a rank
    found nothing to learn from, would leave the other ranks waiting for this one.
    """
    anchor = next((value for value in parameters if value.requires_grad), None)
    return loss if anchor is None else _Anchor.apply(loss, anchor)  # type: ignore[no-untyped-call]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _expect(reducer: Any, loss: Tensor) -> None:
    """Tell the reducer that a backward pass from this loss begins, whose gradients it shall average."""
    reducer.prepare_for_forward()
    if _Quietly.done:
        reducer.prepare_for_backward([loss])
    else:
        _Quietly.apply(reducer, loss)


class _Quietly(torch.autograd.Function):
    """Has the reducer look for unused parameters without a word, until it has said its word.

    Torch says once per process that the search costs time where all parameters are used. It is what makes a model right
    that uses some on some ranks only, and takes microseconds. The word comes from C++, and only within a call such as
    that of an autograd function does torch turn it into a Python warning, which can be filtered.
    """

    done = False

    @classmethod
    def apply(cls, reducer: Any, loss: Tensor) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().apply(reducer, loss)  # type: ignore[no-untyped-call]
        for warning in caught:
            if "find_unused_parameters=True was specified" in str(warning.message):
                cls.done = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    @staticmethod
    def forward(ctx: Any, reducer: Any, loss: Tensor) -> None:
        reducer.prepare_for_backward([loss])


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that have a gradient to step with."""
    return [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
