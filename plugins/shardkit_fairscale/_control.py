"""FairScale by itself: OSS with ShardedDDP or torch's DDP, as its documentation shows, in any version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardkit import Strategy, Update
from shardkit.control import ControlEngine
from shardkit.optimizers import twin

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_fairscale import FairScaleOptions


@final
class FairScaleControl(ControlEngine):
    """OSS, and the wrapper around the module that the user calls."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FairScaleOptions) -> None:
        super().__init__("fairscale", model, optimizer, strategy)
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self._sharded = options.shard == "gradients"
        self.whole_gradients = not self._sharded
        self._rank = dist.get_rank()
        # What was asked for, and not what our own engine takes where nothing was.
        asked = {name for name in ("reduce_buffer_size", "bucket_cap_mb") if name in strategy.options}
        settings = {name: getattr(options, name) for name in asked}
        # As documented its second argument is the optimizer's class; a constructor may want what nobody kept.
        self._oss: Any = OSS([dict(group) for group in optimizer.param_groups], optim=self._own)
        if self._sharded:
            settings.pop("bucket_cap_mb", None)
            self.model = ShardedDataParallel(model, self._oss, **settings)
        else:
            settings.pop("reduce_buffer_size", None)
            self.model = DistributedDataParallel(model, **settings)
        self.begin()

    def _own(self, groups: list[dict[str, Any]]) -> Optimizer:
        return twin(self.optimizer, groups)

    def step(self) -> Update:
        norm = float(self._oss.clip_grad_norm(self.bound)) if self.wants_norm else None
        self.follow(self._oss.param_groups)
        self._oss.step()
        # Not OSS.zero_grad, which throws away ShardedDDP's buckets: nothing would be averaged any more.
        self.model.zero_grad()
        self.begin()
        return Update(True, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        if not self._sharded:
            return super().full_gradients()
        found = {}
        for name, value in self.module.named_parameters():
            if not value.requires_grad:
                continue
            whole = value.grad
            if value in self._oss._param_to_rank:
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

    def close(self) -> None:
        for hook in getattr(self.model, "_grad_hooks", ()):
            hook.remove()
        super().close()
        del self.model, self._oss
