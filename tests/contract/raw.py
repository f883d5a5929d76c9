"""The raw libraries behind the surface that the cases use of a session.

Each adapter writes the loop as an ordinary user of that library would, after its own documentation, with its default
settings. What a library has no notion of raises :class:`NotOfferedError`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.testing.cases._models import Prepare


class NotOfferedError(Exception):
    """The library has no notion of what the case asks for."""


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIELDS = {"accumulate": 1, "max_grad_norm": None, "track_grad_norm": False, "precision": "fp32"}
_SCALER_FIELDS = {"loss_scale": 2.0**16, "loss_scale_window": 2000}


class _Model:
    """The wrapped model: called through the library, everything else as of the module that the user wrote."""

    def __init__(self, session: RawSession) -> None:
        self.__dict__["session"] = session

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.session.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.session.module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.session.module[key]

    def train(self, mode: bool = True) -> Self:
        self.session.wrapped.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)


@dataclass(frozen=True)
class _Scaler:
    scale: float

    def __getattr__(self, name: str) -> Any:
        raise NotOfferedError(f"scaler.{name}")


class RawSession:
    """What the cases use of a session, by hand over one library: the part that is the same for all."""

    wrapped: Any
    """What the library made of the module."""

    known: dict[str, Any] = _FIELDS
    """The fields of a strategy that can be said to the library, with their defaults."""

    def __init__(self, module: nn.Module, optimizer: Any, fields: dict[str, Any]) -> None:
        unknown = [
            f"{name}={value!r}"
            for name, value in fields.items()
            if name not in self.known and value not in (None, False)
        ]
        if unknown:
            raise NotOfferedError(", ".join(unknown))
        self.strategy = SimpleNamespace(**{**self.known, **fields})
        self.module, self.optimizer = module, optimizer
        self.model = _Model(self)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.steps = self.skipped_steps = 0
        self.norm: Any = None
        self.micro = 0

    def __getattr__(self, name: str) -> Any:
        raise NotOfferedError(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self.wrapped = None

    @property
    def grad_norm(self) -> float:
        return float(self.norm)

    def count(self, *, moved: bool) -> bool:
        """Count a step, and return whether the weights moved."""
        self.step_was_skipped = not moved
        self.steps += moved
        self.skipped_steps += not moved
        return moved

    def forward(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def full_weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}

    def full_gradients(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: value.grad.cpu().clone() for name, value in named if value.grad is not None}

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[nn.Module]:
        training = self.module.training
        self.model.eval()
        with torch.no_grad():
            yield self.module
        self.model.train(training)

    def close(self) -> None:
        """Do what the library asks for at the end."""


class ByHand(RawSession):
    """DistributedDataParallel, and the loop that torch's documentation writes around it.

    ``no_sync`` around forward and backward of all but the window's last micro-batch; the loss is divided by their
    number; gradients are zeroed at the window's beginning, and clipped once at its end.
    """

    known: dict[str, Any] = _FIELDS | _SCALER_FIELDS

    def __init__(self, module: nn.Module, optimizer: Any, fields: dict[str, Any], **settings: Any) -> None:
        super().__init__(module, optimizer, fields)
        self.settings = settings
        self.fresh = True
        self.unsynchronized = contextlib.ExitStack()
        self.grad_scaler: Any = None
        self.wrap(module, optimizer)
        if self.strategy.precision == "fp16":
            self.grad_scaler = self.make_scaler()

    def wrap(self, module: nn.Module, optimizer: Any) -> None:
        self.wrapped = DistributedDataParallel(module, **self.settings)

    def make_scaler(self) -> Any:
        strategy = self.strategy
        return torch.amp.GradScaler("cpu", init_scale=strategy.loss_scale, growth_interval=strategy.loss_scale_window)

    @property
    def scaler(self) -> Any:
        """The loss scale, as far as torch tells it."""
        return None if self.grad_scaler is None else _Scaler(self.grad_scaler.get_scale())

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.wrapped.parameters(), max_norm)

    def begin(self) -> None:
        if not self.fresh:
            return
        self.fresh = False
        if self.micro == 0:
            self.wrapped.zero_grad()
        if self.micro + 1 < self.strategy.accumulate:
            self.unsynchronized.enter_context(self.wrapped.no_sync())

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and self.optimizer is not None:
            self.begin()
        with self.autocast():
            return self.wrapped(*arguments, **named)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _DTYPES.get(self.strategy.precision)
        return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.begin()
        loss = loss / self.strategy.accumulate
        if self.grad_scaler is not None:
            loss = self.grad_scaler.scale(loss)
        loss.backward()
        self.unsynchronized.close()
        self.fresh = True
        self.micro += 1

    def step(self) -> bool:
        if self.micro < self.strategy.accumulate:
            return False
        limit = self.strategy.max_grad_norm
        if limit is None and self.strategy.track_grad_norm:
            limit = float("inf")
        scale = None
        if self.grad_scaler is not None:
            scale = self.grad_scaler.get_scale()
            self.grad_scaler.unscale_(self.optimizer)
        if limit is not None:
            self.norm = self.clip(limit)
        if self.grad_scaler is not None:
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            self.optimizer.step()
        self.micro = 0
        return self.count(moved=scale is None or self.grad_scaler.get_scale() >= scale)

    def optimizer_state(self) -> Any:
        return self.optimizer.state_dict()

    def save(self, folder: Path) -> None:
        state = self.optimizer_state()
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            whole = {"model": self.module.state_dict(), "optimizer": state, "steps": self.steps}
            if self.grad_scaler is not None:
                whole["scaler"] = self.grad_scaler.state_dict()
            torch.save(whole, folder / "checkpoint.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        whole = torch.load(folder / "checkpoint.pt", map_location="cpu")
        self.module.load_state_dict(whole["model"])
        self.optimizer.load_state_dict(whole["optimizer"])
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(whole["scaler"])
        self.steps = whole["steps"]
        dist.barrier()


class Oss(ByHand):
    """FairScale's OSS, made of the class and arguments of the user's optimizer, over DistributedDataParallel."""

    def wrap(self, module: nn.Module, optimizer: Any) -> None:
        self.make(optimizer)
        super().wrap(module, optimizer)

    def make(self, optimizer: Any) -> None:
        from fairscale.optim.oss import OSS

        if optimizer is None:
            raise NotOfferedError("OSS and ShardedDDP are made with an optimizer")
        if "initial_lr" in optimizer.param_groups[0]:
            raise NotOfferedError("OSS makes its own optimizer, so a schedule is built after it")
        # What the user wrote: the arguments that aren't the constructor's defaults, and the groups' own settings.
        defaults = optimizer.defaults
        signature = inspect.signature(type(optimizer).__init__).parameters
        arguments = {
            name: value
            for name, value in defaults.items()
            if name in signature and (name == "lr" or value != signature[name].default)
        }
        groups = [
            {key: value for key, value in group.items() if key == "params" or defaults.get(key, ...) != value}
            for group in optimizer.param_groups
        ]
        self.optimizer = OSS(groups, optim=type(optimizer), **arguments)

    def make_scaler(self) -> Any:
        from fairscale.optim.grad_scaler import ShardedGradScaler

        strategy = self.strategy
        return ShardedGradScaler(init_scale=strategy.loss_scale, growth_interval=strategy.loss_scale_window)

    def clip(self, max_norm: float) -> Any:
        return self.optimizer.clip_grad_norm(max_norm)

    def optimizer_state(self) -> Any:
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        return self.optimizer.state_dict() if self.rank == 0 else None


class Sharded(Oss):
    """FairScale's OSS and ShardedDDP."""

    def wrap(self, module: nn.Module, optimizer: Any) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel

        self.make(optimizer)
        self.wrapped = ShardedDataParallel(module, self.optimizer, **self.settings)

    def full_gradients(self) -> dict[str, Tensor]:
        raise NotOfferedError("a gradient is whole on the rank that owns it only")


class DeepSpeed(RawSession):
    """The engine of ``deepspeed.initialize``, with the optimizer that the user built."""

    def __init__(
        self, module: nn.Module, optimizer: Any, fields: dict[str, Any], *, stage: int, **settings: Any
    ) -> None:
        import deepspeed

        super().__init__(module, optimizer, fields)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.strategy.accumulate,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            **settings,
        }
        if self.strategy.max_grad_norm is not None:
            config["gradient_clipping"] = self.strategy.max_grad_norm
        if self.strategy.precision in _DTYPES:
            dtype = str(_DTYPES[self.strategy.precision]).removeprefix("torch.")
            config["torch_autocast"] = {"enabled": True, "dtype": dtype}
        self.stage = stage
        self.wrapped, returned, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.optimizer = returned

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.wrapped(*arguments, **named)

    def backward(self, loss: Tensor) -> None:
        self.wrapped.backward(loss)

    def step(self) -> bool:
        boundary = self.wrapped.is_gradient_accumulation_boundary()
        self.wrapped.step()
        if not boundary:
            return False
        self.norm = self.wrapped.get_global_grad_norm()
        return self.count(moved=self.wrapped.was_step_applied())

    @property
    def grad_norm(self) -> float:
        if self.norm is None:
            raise NotOfferedError("get_global_grad_norm() gives None without clipping")
        return float(self.norm)

    def full_weights(self) -> dict[str, Tensor]:
        if self.stage < 3:
            return super().full_weights()
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            return super().full_weights()

    def full_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {name: safe_get_full_grad(value) for name, value in self.module.named_parameters()}
        return {name: value.cpu().clone() for name, value in found.items() if value is not None}

    def save(self, folder: Path) -> None:
        self.wrapped.save_checkpoint(str(folder), client_state={"steps": self.steps})

    def load(self, folder: Path) -> None:
        _, state = self.wrapped.load_checkpoint(str(folder))
        self.steps = state["steps"]

    def close(self) -> None:
        self.wrapped.destroy()


@dataclass(frozen=True)
class Raw:
    """A raw library: the strategy of shardkit over the same, what makes its session, and a setting to try then.

    What isn't right at the default settings is tried again with ``remedy``, the setting that is known to help most.
    """

    like: str
    make: Callable[..., RawSession]
    remedy: dict[str, Any]

    @property
    def words(self) -> str:
        """The setting to try, as one writes it."""
        return ", ".join(f"{name}={value}" for name, value in self.remedy.items())

    def with_remedy(self) -> Raw:
        """Return the same library with that setting."""
        return replace(self, make=partial(self.make, **self.remedy), remedy={})


RAW = {
    "DDP": Raw("ddp", ByHand, {"find_unused_parameters": True}),
    "FairScale OSS, ShardedDDP": Raw("fairscale", Sharded, {"reduce_buffer_size": 0}),
    "FairScale OSS, DDP": Raw("fairscale:shard=optimizer", Oss, {"find_unused_parameters": True}),
} | {
    f"DeepSpeed stage {stage}": Raw(
        f"deepspeed:stage={stage}", partial(DeepSpeed, stage=stage), {"gradient_clipping": 0.0}
    )
    for stage in range(4)
}


@dataclass(frozen=True)
class RawPrepare:
    """Prepares by hand over a raw library, as ``Prepare`` does under a strategy."""

    raw: Raw
    folder: Path

    @property
    def text(self) -> str:
        return self.raw.like

    @property
    def shards(self) -> frozenset[str]:
        return Prepare(self.text, self.folder).shards

    def __call__(self, model: nn.Module, optimizer: Any, **fields: Any) -> RawSession:
        return self.raw.make(model, optimizer, copy.copy(fields))
