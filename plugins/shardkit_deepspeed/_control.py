"""DeepSpeed by itself: ``deepspeed.initialize`` and its engine, as its documentation shows, in any version."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from packaging.version import Version

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import InputError, UnsupportedError
from shardkit.gradients import gradients, total_norm
from shardkit.optimizers import twin
from shardkit_deepspeed._keys import OFFLOADS, ZERO_OPTIONS
from shardkit_deepspeed._library import accelerator_for, follow_group, quiet, restore_linear, without_compiler
from shardkit_deepspeed._restore import Restore

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardkit_deepspeed._options import DeepSpeedOptions

_DEFAULT_STAGE = 2
_WITHOUT_NUMACTL = Version("0.16")


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: DeepSpeedOptions) -> Engine:
    """Return DeepSpeed's own engine in the clothes of ours. Collective."""
    if options.config is not None or options.half_weights:
        name = "half_weights" if options.config is None else "config"
        raise UnsupportedError(f"the control of backend 'deepspeed' doesn't follow the option {name}: leave it out")
    if strategy.precision == "fp16":
        raise UnsupportedError("the control of backend 'deepspeed' trains in precision fp32 or bf16, not in fp16")
    if optimizer.state:
        raise InputError("the control of backend 'deepspeed' begins with a fresh optimizer: this one has state")
    return ControlEngine(model, optimizer, strategy, options)


def config_of(strategy: Strategy, options: DeepSpeedOptions) -> dict[str, Any]:
    """Return what DeepSpeed has to be told of a strategy, and nothing that it may choose itself."""
    stage = _DEFAULT_STAGE if options.stage is None else options.stage
    zero: dict[str, Any] = {"stage": stage}
    for name, (key, *_) in ZERO_OPTIONS.items():
        if name != "stage" and getattr(options, name) is not None:
            zero[key] = getattr(options, name)
    for name, key in OFFLOADS.items():
        if getattr(options, name) == "cpu":
            zero[key] = {"device": "cpu"}
    config: dict[str, Any] = {
        # DeepSpeed wants the number, and compares it with no batch.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": strategy.accumulate,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if "offload_optimizer" in zero:
        # Else it wants an optimizer of its own, which it compiles.
        config["zero_force_ds_cpu_optimizer"] = False
    if strategy.max_grad_norm is not None:
        config["gradient_clipping"] = strategy.max_grad_norm
    return config


@final
class ControlEngine(Engine):
    """DeepSpeed's engine, which is also the module that the user calls.

    Nothing here communicates after DeepSpeed's own step: up to 0.19.7 the next forward at stage 3 may use weights that
    are still on their way, and whatever waits for other ranks in between hides that.
    """

    optimizer: Optimizer
    # So that ranks with fewer micro-batches refuse along with the others, which wait for them in a forward.
    lockstep = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: DeepSpeedOptions) -> None:
        config = config_of(strategy, options)
        self._stage: int = config["zero_optimization"]["stage"]
        self._module = model
        self.optimizer = optimizer
        self.whole_gradients = self._stage == 0
        self._accumulate = strategy.accumulate
        self._checked: Tensor | None = None
        self._wants_norm = strategy.max_grad_norm is not None or strategy.track_grad_norm
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._values: list[Any] = list(model.parameters())
        # The session refuses steps of the user's optimizer that aren't its own, so DeepSpeed gets another.
        self._groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        restore = Restore(model)
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(_environment(_launcher(self._values[0].device)))
            self._deepspeed = _import(self._values[0].device)
            if Version(self._deepspeed.__version__) < _WITHOUT_NUMACTL:
                # At stage 3 these ask a program that may not be installed how many devices there are.
                stack.enter_context(_environment({"LOCAL_SIZE": str(dist.get_world_size())}))
            _join(self._deepspeed)
            self._engine, *_ = self._deepspeed.initialize(
                model=model, optimizer=twin(optimizer, list(self._groups)), config=config
            )
            self._open = stack.pop_all()
        self._restore = restore
        restore.built()
        self.model = self._engine

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        self._check(gradient)
        self._engine.backward(loss)
        if not last:
            self._engine.step()

    def _check(self, gradient: Tensor) -> None:
        """Raise unless the window is a whole one of micro-batches that count the same."""
        if gradient is self._checked:
            return
        share = gradient.item()
        if not math.isnan(share):
            if not math.isclose(share, 1 / self._accumulate, rel_tol=torch.finfo(gradient.dtype).eps):
                raise UnsupportedError(
                    f"the control of backend 'deepspeed' divides each loss by accumulate={self._accumulate} itself "
                    f"and can't give one the weight {share:.4g}: every window must have that many on every rank"
                )
            self._checked = gradient

    def step(self) -> Update:
        norm = total_norm(gradients(self._values)).item() if self._wants_norm and self._stage == 0 else None
        for user, own in zip(self.optimizer.param_groups, self._groups, strict=True):
            own.update((key, value) for key, value in user.items() if key not in ("params", "param_names"))
        self._engine.step()
        if self._wants_norm and self._stage:
            norm = float(self._engine.get_global_grad_norm())
        return Update(bool(self._engine.was_step_applied()), norm)

    def full_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {}
        for value in self._values:
            whole = safe_get_full_grad(value) if value.requires_grad else None
            if whole is not None:
                found[self._names[id(value)]] = whole.detach().to("cpu", copy=True)
        return found

    def full_weights(self) -> dict[str, Tensor]:
        held = self._module.state_dict(keep_vars=True)
        return {name: self._whole(value).cpu() for name, value in held.items()}

    def gathered(self) -> AbstractContextManager[None]:
        if self._stage == 3:
            raise UnsupportedError(
                "the control of backend 'deepspeed' at stage 3 gathers weights module by module, on all ranks at once: "
                "call the model the same number of times on every rank in place of session.evaluate()"
            )
        return super().gathered()

    def weight_shards(self) -> list[Shard]:
        shards = []
        for value in self._values:
            start, part = 0, value.detach()
            if hasattr(value, "ds_id"):
                start = dist.get_rank() * value.partition_numel()
                count = min(value.partition_numel(), value.ds_numel - start)
                part = value.ds_tensor.detach().view(-1).narrow(0, 0, max(count, 0))
            if part.numel():
                shards.append(Shard(self._names[id(value)], start, part))
        return shards

    def state_shards(self) -> list[Shard]:
        raise UnsupportedError("the control of backend 'deepspeed' is for comparing runs: its state isn't saved")

    def restart(self) -> None:
        self.state_shards()

    def close(self) -> None:
        whole = [self._whole(value) for value in self._values]
        self._engine.destroy()
        for value, own in zip(self._values, whole, strict=True):
            value.grad = None
            value.data = own
        self._restore.undo()
        if self._stage == 3:
            restore_linear()
        self._open.close()

    @torch.no_grad()
    def _whole(self, value: Any) -> Tensor:
        if not hasattr(value, "ds_id"):
            return _copied(value)
        with self._deepspeed.zero.GatheredParameters([value]):
            return _copied(value)


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone()


def _import(device: torch.device) -> Any:
    """Import DeepSpeed for this device."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if get_accelerator().device_name() != device.type:
        set_accelerator(accelerator_for(device))
    return deepspeed


def _join(deepspeed: Any) -> None:
    """Have DeepSpeed join the process group anew, as if nobody had before."""
    from deepspeed.comm import comm

    follow_group()
    # An engine of the plugin's own that was here before has changed how this one calls torch.
    comm.cdb = None
    # Else the collectives in shared memory are compiled first: a minute in each fresh environment, for ever at the lock
    # of a compiler that was killed, and for nothing, since without its own launcher DeepSpeed doesn't use them.
    with without_compiler(deepspeed.ops):
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def _launcher(device: torch.device) -> dict[str, str]:
    """Return the variables of a launcher, which DeepSpeed reads as it trains too."""
    return {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(torch.cuda.current_device()) if device.type == "cuda" else "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ACCELERATOR": device.type,
    }


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set those variables of the environment that aren't set."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
