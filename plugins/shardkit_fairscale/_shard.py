"""The optimizer in shards: each rank holds state for the parameters that it owns, and updates those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.errors import UnsupportedError
from shardkit.optimizers import reach
from shardkit.owners import Part, raise_together
from shardkit_fairscale._library import OSS, unconfigured_logging

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Shards:
    """FairScale's OSS around copies of the user's optimizer, one per rank, each over the parameters that it owns.

    Parameters of the model that the optimizer leaves out have an owner too, which holds their averaged gradients.
    Nobody updates them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._user = optimizer
        self._world = dist.get_world_size()
        self._rank = dist.get_rank()
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._failed = torch.zeros((), device=next(model.parameters()).device)
        given = [list(group["params"]) for group in optimizer.param_groups]
        self.optimized: list[Tensor] = [parameter for group in given for parameter in group]
        rest = [parameter for parameter in self._names if parameter not in set(self.optimized)]
        self.check()
        if self._world > 1:
            self._check_reach()
        self._part = Part("fairscale", optimizer, self._names)
        with unconfigured_logging():
            self.oss = OSS([{"params": group} for group in ([*given, rest] if rest else given)], optim=self._part.over)
        self.inner = self._part.stepper
        self.owned = [parameter for parameter in self.optimized if self.owner(parameter) == self._rank]
        self._pointers = self._addresses()
        self._part.carry_over(self.owner)

    def check(self) -> None:
        """Raise where FairScale can't hold the trainable parameters.

        Raises:
            UnsupportedError: they are of several dtypes, or complex.
        """
        dtypes = {parameter.dtype: name for parameter, name in self._names.items() if parameter.requires_grad}
        if len(dtypes) > 1:
            found = " and ".join(f"{dtype} ({name!r})" for dtype, name in dtypes.items())
            raise UnsupportedError(
                f"backend 'fairscale' keeps a rank's trainable parameters in one buffer, of one dtype, not of {found}: "
                "give them one dtype, or use the strategy 'ddp'"
            )
        for dtype, name in dtypes.items():
            if dtype.is_complex:
                raise UnsupportedError(
                    f"backend 'fairscale' can't send complex parameters such as {name!r} ({dtype}): use the "
                    "strategy 'ddp'"
                )

    def _check_reach(self) -> None:
        found = reach(self._user)
        if found.unit == "model":
            raise UnsupportedError(
                f"backend 'fairscale' splits the parameters over the ranks, and {type(self._user).__name__} "
                f"{found.cause}: use the strategy 'ddp', where it sees the whole model"
            )

    def owner(self, parameter: Tensor) -> int:
        """Return the rank that updates this parameter."""
        return int(self.oss._param_to_rank[parameter])

    def reduce(self, parameter: Tensor) -> None:
        """Average one parameter's gradient at its owner; a rank without one adds zeros. Collective."""
        owner = self.owner(parameter)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.detach().mul_(1 / self._world)
        dist.reduce(gradient, dst=owner)
        parameter.grad = gradient if owner == self._rank else None

    def update(self, beyond: list[Tensor]) -> None:
        """Update the parameters that this rank owns, and take the others' from their owners. Collective.

        ``beyond`` are parameters that changed outside of FairScale's buffers. An error of the optimizer on one rank is
        raised on all.
        """
        if self._world > 1:
            self._hold_parameters()
        error = None
        try:
            self._part.begin()
            self.inner.step()
            if self._world == 1:
                # One that changes itself, which several ranks refuse, trains from the user's values.
                self._part.give_back()
        except Exception as caught:
            if self._world == 1:
                raise
            error = caught
        if self._world > 1:
            self._exchange(error, beyond)
        self._part.end()

    def _exchange(self, error: Exception | None, beyond: list[Tensor]) -> None:
        # Only the owner of a parameter sees that its settings are bad: all must hear of it, or wait for its weights.
        self._failed.fill_(error is not None)
        work = dist.all_reduce(self._failed, async_op=True)
        self.oss._broadcast_params()
        for parameter in beyond:
            dist.broadcast(parameter.detach(), src=self.owner(parameter))
        work.wait()
        if self._failed.item():
            raise_together(error)

    def refresh(self) -> None:
        """Follow a change of which parameters are trainable, the same on every rank."""
        self.check()
        with unconfigured_logging():
            self.oss.refresh_trainable()
        self._pointers = self._addresses()

    def close(self) -> None:
        """Give each parameter memory of its own again, and forget the optimizer's state."""
        for buckets in self.oss.buckets.values():
            for rank in list(buckets):
                for parameter in buckets.pop(rank)._params:
                    parameter.data = parameter.data.clone()
        self.inner.state.clear()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._names]

    def _hold_parameters(self) -> None:
        # Someone gave a parameter other memory (``parameter.data = ...``): FairScale would send what was there before.
        if self._addresses() != self._pointers:
            self.refresh()
