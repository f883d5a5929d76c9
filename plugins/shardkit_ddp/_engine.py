"""The engine over DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from shardkit import Engine, Strategy, Update
from shardkit.averaging import Reducer
from shardkit.errors import UnsupportedError
from shardkit.gradients import all_finite, gradients, total_norm, unscale
from shardkit_ddp._average import Kinds

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_ddp._options import DDPOptions


@final
class DDPEngine(Engine):
    """The user's module and optimizer, and torch's reducer between them."""

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
        self._reducer: Reducer | None = None
        # The first window is averaged after the pass. It shows whether gradients are sparse, or come from a backward
        # within the backward, which the reducer can't follow on some ranks and must know on all.
        self._overlap = False
        self._may_overlap = options.overlap

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        if self._distributed:
            self._backward_on_ranks(loss, gradient, last=last)
        else:
            loss.backward(gradient)
        if last and self.loss_scale != 1.0:
            unscale(gradients(self._parameters), self.loss_scale)

    def _backward_on_ranks(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        reducer = self._reducer if last and self._overlap and not self._thawed() else None
        passes = _Passes(loss, self._parameters) if last and self._may_overlap and reducer is None else None
        try:
            if reducer is None:
                loss.backward(gradient)
            else:
                reducer.backward(loss, gradient)
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
        if last and reducer is None:
            self._average(passes)

    def _average(self, passes: _Passes | None) -> None:
        """Average what passes without the reducer left, and from now on with it where it can follow. Collective."""
        kinds = Kinds(self._parameters, special=passes is not None and passes.nested())
        self._may_overlap = self._may_overlap and not kinds.special
        # The reducers of ranks that don't train the same parameters would send each other other buckets.
        self._overlap = self._may_overlap and not kinds.apart
        kinds.average()

    def _thawed(self) -> bool:
        # The reducer knows only those parameters that were trainable when it was built.
        return any(value.requires_grad for value in self._frozen)

    def _build(self) -> Reducer:
        """Build the reducer over those parameters that are trainable. Collective."""
        self._forget()
        self._frozen = [value for value in self._parameters if not value.requires_grad]
        self._reducer = Reducer(
            self.model,
            bucket_cap_mb=self._options.bucket_cap_mb,
            gradient_as_bucket_view=self._options.gradient_as_bucket_view,
        )
        return self._reducer

    def _forget(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._frozen = None, []

    def step(self) -> Update:
        applied, norm = self._update()
        if self._reducer is not None:
            self._reducer.drop()
        for parameter in self._parameters:
            parameter.grad = None
        if self._overlap and self._distributed and (self._reducer is None or self._thawed()):
            # When a rank holds least.
            self._build().drop()
        return Update(applied, norm)

    def _update(self) -> tuple[bool, float | None]:
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
        return applied, norm

    def full_gradients(self) -> dict[str, Tensor]:
        return {
            name: value.grad.detach().to_dense().cpu().clone()
            for name, value in self.model.named_parameters()
            if value.grad is not None
        }

    def restart(self) -> None:
        super().restart()
        # A backward that failed may have left it in the middle of its work.
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        # How gradients are averaged decides in which order they are added up: whether by the reducer, and with what
        # beside them in its buckets, which keep their place for a parameter that is frozen later.
        apart = None
        if self._reducer is not None:
            frozen = {id(value) for value in self._frozen}
            apart = [place for place, value in enumerate(self._by_name()) if id(value) in frozen]
        return {"overlap": self._overlap, "may_overlap": self._may_overlap, "apart": apart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._overlap, self._may_overlap = state["overlap"], state["may_overlap"]
        self._forget()
        if state["apart"] is not None and self._distributed:
            apart = set(state["apart"])
            trainable = [value.requires_grad for value in self._parameters]
            try:
                for place, value in enumerate(self._by_name()):
                    value.requires_grad_(place not in apart and _has_gradients(value))
                self._build().drop()
            finally:
                for value, flag in zip(self._parameters, trainable, strict=True):
                    value.requires_grad_(flag)

    def _by_name(self) -> list[Tensor]:
        return [value for _, value in sorted(self.model.named_parameters(), key=lambda pair: pair[0])]

    def close(self) -> None:
        for parameter in self._parameters:
            # Those of a window in progress are views of the reducer's buckets.
            parameter.grad = None
        self._forget()
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


def _has_gradients(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that have a gradient to step with."""
    return [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
