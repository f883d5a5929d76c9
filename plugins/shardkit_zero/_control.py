"""torch by itself: ZeroRedundancyOptimizer beside DistributedDataParallel, as its documentation shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from shardkit import Strategy, Update
from shardkit.control import ControlEngine
from shardkit.optimizers import twin
from shardkit_zero._library import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@final
class ZeroControl(ControlEngine):
    """ZeroRedundancyOptimizer, and the wrapper around the module that the user calls."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        super().__init__("zero", model, optimizer, strategy)
        settings = {name: value for name, value in strategy.options.items() if name == "bucket_cap_mb"}
        self.model = DistributedDataParallel(model, **settings)
        # As documented its second argument is the optimizer's class; a constructor may want what nobody kept.
        groups = [dict(group) for group in optimizer.param_groups]
        self._zero = ZeroRedundancyOptimizer(groups, optimizer_class=self._own)  # type: ignore[arg-type]
        self.begin()

    def _own(self, groups: list[dict[str, Any]]) -> Optimizer:
        return twin(self.optimizer, groups)

    def step(self) -> Update:
        trained = [value for group in self.optimizer.param_groups for value in group["params"]]
        norm = clip_grad_norm_(trained, self.bound).item() if self.wants_norm else None
        self.follow(self._zero.param_groups)
        self._zero.step()
        self._zero.zero_grad()
        self.begin()
        return Update(True, norm)

    def close(self) -> None:
        super().close()
        del self.model, self._zero
