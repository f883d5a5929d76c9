"""fully_shard by itself, as its documentation shows: each block, then the model, and an optimizer over DTensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import InputError, UnsupportedError
from shardkit.optimizers import twin
from shardkit_fsdp._restore import Restore
from shardkit_fsdp._wrap import units

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from shardkit_fsdp._options import FSDPOptions


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FSDPOptions) -> Engine:
    """Return fully_shard's module in the clothes of our engine. Collective."""
    if strategy.precision == "fp16":
        raise UnsupportedError("the control of backend 'fsdp' trains in precision fp32 or bf16, not in fp16")
    if options.gather != "fp32":
        raise UnsupportedError("the control of backend 'fsdp' gathers parameters in float32: leave gather out")
    if optimizer.state:
        raise InputError("the control of backend 'fsdp' begins with a fresh optimizer: this one has state")
    return ControlEngine(model, optimizer, strategy, options)


@final
class ControlEngine(Engine):
    """The user's module, of fully_shard's class, with DTensors for parameters."""

    optimizer: Optimizer
    whole_gradients = False
    lockstep = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: FSDPOptions) -> None:
        self.model = model
        self.optimizer = optimizer
        self._accumulate = strategy.accumulate
        self._max_norm = strategy.max_grad_norm
        self._wants_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._places = [
            (part, name, value)
            for part in model.modules()
            for name, value in part._parameters.items()
            if value is not None
        ]
        settings: dict[str, Any] = {}
        # What was asked for, and not what our own engine takes where nothing was.
        if "reshard_after_forward" in strategy.options:
            settings["reshard_after_forward"] = options.reshard_after_forward
        if options.offload == "cpu":
            # Without a GPU there are no locked pages, which it asks for by default.
            device = next(model.parameters()).device.type
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
        self._restore = Restore(model)
        before = [name for name, _ in model.named_parameters()]
        originals = dict(model.named_parameters())
        for unit in [*units(model, options.wrap), model]:
            fully_shard(unit, **settings)
        self._new = dict(model.named_parameters())
        assert list(self._new) == before
        replaced = {id(originals[name]): value for name, value in self._new.items()}
        # The session refuses steps of the user's optimizer that aren't its own, so the DTensors get another.
        self._groups = [
            {**group, "params": [replaced[id(value)] for value in group["params"]]} for group in optimizer.param_groups
        ]
        self._stepper = twin(optimizer, list(self._groups))
        self._originals = originals
        self._checked: Tensor | None = None

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        if gradient is not self._checked:
            share = gradient.item()
            if not math.isnan(share) and not math.isclose(share, 1 / self._accumulate, rel_tol=1e-6):
                raise UnsupportedError(
                    f"the control of backend 'fsdp' divides each loss by accumulate={self._accumulate}, and can't give "
                    f"one the weight {share:.4g}: every window must have that many on every rank"
                )
            self._checked = gradient
        (loss / self._accumulate).backward()

    def step(self) -> Update:
        for user, own in zip(self.optimizer.param_groups, self._groups, strict=True):
            own.update((key, value) for key, value in user.items() if key not in ("params", "param_names"))
        norm = None
        if self._wants_norm:
            values = list(self._new.values())
            total: Any = get_total_norm([value.grad for value in values if value.grad is not None])
            total = total.full_tensor() if hasattr(total, "full_tensor") else total
            norm = float(total)
            if self._max_norm is not None:
                clip_grads_with_norm_(values, self._max_norm, total)
        self._stepper.step()
        self._stepper.zero_grad()
        return Update(True, norm)

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: _whole(value.grad) for name, value in self._new.items() if value.grad is not None}

    def full_weights(self) -> dict[str, Tensor]:
        return {name: _whole(value) for name, value in self.model.state_dict().items()}

    def gathered(self) -> Any:
        raise UnsupportedError(
            "the control of backend 'fsdp' gathers weights module by module, on all ranks at once: call the model the "
            "same number of times on every rank in place of session.evaluate()"
        )

    def weight_shards(self) -> list[Shard]:
        shards = []
        for name, value in self._new.items():
            held: Any = value
            local = held.to_local().detach()
            rows = -(-value.shape[0] // held.device_mesh.size()) * held.device_mesh.get_local_rank()
            if local.numel():
                shards.append(Shard(name, rows * (value.numel() // value.shape[0]), local))
        return shards

    def state_shards(self) -> list[Shard]:
        raise UnsupportedError("the control of backend 'fsdp' is for comparing runs: its state isn't saved")

    def restart(self) -> None:
        self.state_shards()

    def close(self) -> None:
        whole = {name: _whole(value) for name, value in self._new.items()}
        by_id = {id(self._originals[name]): value for name, value in whole.items()}
        self._restore.hooks()
        self._restore.undo()
        for part, name, value in self._places:
            part._parameters[name] = value
            value.grad = None
            value.data = by_id[id(value)].to(value.device)


@torch.no_grad()
def _whole(value: Any) -> Tensor:
    held = value.detach()
    whole: Tensor = held.full_tensor() if hasattr(held, "full_tensor") else held
    return whole.cpu().clone()
