"""An engine whose ranks all hold the whole weights and the whole averaged gradients, and what it holds in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from shardkit._average import BUCKET_BYTES, Kinds
from shardkit._engine import Engine, Update
from shardkit._footprint import Footprint, ModelSize, Stepped
from shardkit.averaging import Reducer, ReducerFootprint
from shardkit.errors import UnsupportedError
from shardkit.gradients import all_finite, gradients, total_norm, unscale

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit._strategy import Strategy


class ReplicatedEngine(Engine):
    """The user's module and optimizer, and torch's reducer between them.

    Gradients are averaged during the window's last backward; after it in the first window, and wherever the reducer
    can't follow: sparse gradients, and a backward within the backward. A subclass may update the weights in another way
    than by the user's optimizer on every rank: see :meth:`update`. ``backend`` is the name that errors bear; the
    backend has an option ``overlap`` that comes here.
    """

    optimizer: Optimizer

    def __init__(
        self,
        backend: str,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        overlap: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        # Kept here: once the session is open, it guards the optimizer's own.
        self._optimizer_step = optimizer.step
        self._backend = backend
        self._parameters = list(model.parameters())
        self._max_norm = strategy.max_grad_norm
        self._want_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._bucket_cap_mb = bucket_cap_mb
        self._views = gradient_as_bucket_view
        self._distributed = dist.get_world_size() > 1
        self._frozen: list[Tensor] = []
        self._reducer: Reducer | None = None
        # The first window is averaged after the pass. It shows whether gradients are sparse, or come from a backward
        # within the backward, which the reducer can't follow on some ranks and must know on all.
        self._overlap = False
        self._may_overlap = overlap

    def updated(self) -> list[Tensor]:
        """Return the parameters that :meth:`update` steps on this rank: all that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def update(self) -> None:
        """Step the optimizer, from gradients that are averaged and clipped. Collective.

        Called where all gradients are finite. Those of other parameters than :meth:`updated` returns aren't clipped.
        """
        self._optimizer_step()

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
            instead = f"'{self._backend}:overlap=false'"
            if "SparseTensorImpl" in str(error):
                raise UnsupportedError(
                    f"backend {self._backend!r} got a sparse gradient after a first window without any, when its "
                    f"reducer no longer expects one: use {instead}, which averages gradients of any kind after the pass"
                ) from error
            if "mark a variable ready only once" not in str(error):
                raise
            raise UnsupportedError(
                f"backend {self._backend!r} got the gradient of a parameter twice in one backward pass, as gradient "
                "checkpointing with use_reentrant=True gives it: checkpoint with use_reentrant=False, or use "
                f"{instead}, which averages the gradients after the pass"
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
        self._reducer = Reducer(self.model, bucket_cap_mb=self._bucket_cap_mb, gradient_as_bucket_view=self._views)
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
                clipped = [parameter for parameter in self.updated() if parameter.grad is not None]
                clip_grads_with_norm_(clipped, self._max_norm, total)
        else:
            applied = all_finite(trained)
        if applied:
            self.update()
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


class ReplicatedFootprint(Footprint):
    """What a rank holds under a :class:`ReplicatedEngine` with these options: whole weights, and gradients that are
    copied into the reducer's buckets as they come. A subclass may say of other parameters that they are ``stepped``."""

    def __init__(
        self,
        model: ModelSize,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        overlap: bool = True,
    ) -> None:
        super().__init__(model)
        self.held.parameters = sum(value.nbytes for value in model.parameters)
        trainable = [value for value in model.parameters if value.trainable]
        size = sum(value.nbytes for value in trainable)
        self._reducer: ReducerFootprint | None = None
        self._scratch = self._copied = 0
        if model.world_size == 1:
            return
        self._scratch = min(_SCRATCH, size) if model.device == "cpu" else 0
        if overlap:
            self._reducer = ReducerFootprint(
                trainable, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view
            )
            self.held.buffers = self._reducer.buffers
        else:
            # Small gradients are put together to be averaged.
            self._copied = min(BUCKET_BYTES, size)

    def stepped(self) -> Sequence[Stepped]:
        return [
            Stepped(value.shape, value.name) for value in self.model.parameters if value.updated and value.trainable
        ]

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        if self._reducer is None:
            self.held.gradients += nbytes
            return 0
        passing = self._reducer.ready(name, nbytes, last=last)
        self.held.gradients = self._reducer.gradients
        return max(passing, self._scratch) if last else 0

    def step(self) -> int:
        if self._reducer is not None:
            self._reducer.drop()
        self.held.gradients = 0
        return self._copied + self._scratch


_SCRATCH = 2 * 2**20
"""What gloo takes for itself in an all-reduce, at most: two pieces of 1 MiB. Measured with torch 2.13."""


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
