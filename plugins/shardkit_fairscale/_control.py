"""FairScale by itself: OSS with ShardedDDP or torch's DDP, as its documentation shows, in any version."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import InputError, UnsupportedError
from shardkit.optimizers import twin

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_fairscale import FairScaleOptions


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FairScaleOptions) -> Engine:
    """Return FairScale's own classes in the clothes of our engine. Collective."""
    if strategy.precision == "fp16":
        raise UnsupportedError("the control of backend 'fairscale' trains in precision fp32 or bf16, not in fp16")
    if optimizer.state:
        raise InputError("the control of backend 'fairscale' begins with a fresh optimizer: this one has state")
    return ControlEngine(model, optimizer, strategy, options)


@final
class ControlEngine(Engine):
    """OSS, and the wrapper around the module that the user calls."""

    optimizer: Optimizer
    # So that ranks with fewer micro-batches refuse along with the others, which wait for them in a forward.
    lockstep = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FairScaleOptions) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self.optimizer = optimizer
        self._module = model
        # Nothing is clipped at infinity, and the norm is told.
        self._bound = math.inf if strategy.max_grad_norm is None else strategy.max_grad_norm
        self._wants_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._accumulate = strategy.accumulate
        self._checked: Tensor | None = None
        self._sharded = options.shard == "gradients"
        self.whole_gradients = not self._sharded
        self._rank = dist.get_rank()
        # What was asked for, and not what our own engine takes where nothing was.
        asked = {name for name in ("reduce_buffer_size", "bucket_cap_mb") if name in strategy.options}
        settings = {name: getattr(options, name) for name in asked}
        # As documented its second argument is the optimizer's class; a constructor may want what nobody kept.
        self._oss: Any = OSS([dict(group) for group in optimizer.param_groups], optim=self._own)
        self.model: Any
        if self._sharded:
            settings.pop("bucket_cap_mb", None)
            self.model = ShardedDataParallel(model, self._oss, **settings)
        else:
            settings.pop("reduce_buffer_size", None)
            self.model = DistributedDataParallel(model, **settings)
        self._alone: ExitStack | None = None
        self._begin()

    def _own(self, groups: list[dict[str, Any]]) -> Optimizer:
        return twin(self.optimizer, groups)

    def _begin(self) -> None:
        self._micro = 0
        if self._accumulate > 1:
            # The forward of a micro-batch, too, must know that others follow.
            self._alone = ExitStack()
            self._alone.enter_context(self.model.no_sync())

    def _synchronize(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        self._check(gradient)
        loss.backward(gradient)
        self._micro += 1
        if self._micro == self._accumulate - 1:
            self._synchronize()

    def _check(self, gradient: Tensor) -> None:
        """Raise unless the window is a whole one of micro-batches that count the same."""
        if gradient is self._checked:
            return
        share = gradient.item()
        if not math.isnan(share):
            if not math.isclose(share, 1 / self._accumulate, rel_tol=torch.finfo(gradient.dtype).eps):
                raise UnsupportedError(
                    f"the control of backend 'fairscale' averages at micro-batch {self._accumulate} of a window "
                    f"and can't give one the weight {share:.4g}: every window must have that many on every rank"
                )
            self._checked = gradient

    def step(self) -> Update:
        norm = float(self._oss.clip_grad_norm(self._bound)) if self._wants_norm else None
        for user, own in zip(self.optimizer.param_groups, self._oss.param_groups, strict=True):
            own.update((key, value) for key, value in user.items() if key not in ("params", "param_names"))
        self._oss.step()
        # Not OSS.zero_grad, which throws away ShardedDDP's buckets: nothing would be averaged any more.
        self.model.zero_grad()
        self._begin()
        return Update(True, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self._module.named_parameters():
            if not value.requires_grad:
                continue
            whole = value.grad
            if self._sharded and value in self._oss._param_to_rank:
                owner = self._oss._param_to_rank[value]
                # Elsewhere there may be none, or this rank's own.
                has = torch.tensor(value.grad is not None, dtype=torch.uint8, device=value.device)
                dist.broadcast(has, owner)
                if not has:
                    continue
                whole = value.grad.clone() if owner == self._rank else torch.empty_like(value)  # type: ignore[union-attr]
                dist.broadcast(whole.detach(), owner)
            if whole is not None:
                found[name] = whole.detach().to("cpu", copy=True)
        return found

    def full_weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self._module.state_dict().items()}

    def weight_shards(self) -> list[Shard]:
        return [Shard(name, 0, value.detach()) for name, value in self._module.named_parameters()]

    def state_shards(self) -> list[Shard]:
        raise UnsupportedError("the control of backend 'fairscale' is for comparing runs: its state isn't saved")

    def restart(self) -> None:
        self.state_shards()

    def close(self) -> None:
        self._synchronize()
        for hook in getattr(self.model, "_grad_hooks", ()):
            hook.remove()
        for value in self._module.parameters():
            value.grad = None
            # Memory of its own again, and no view of OSS's buffers.
            value.data = value.data.clone()
        del self.model, self._oss
