"""One model and its optimizer under FairScale's FullyShardedDataParallel: parameters are split, too. For CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import nn

from shardkit import Engine, Shard, Strategy, Update
from shardkit.errors import UnsupportedError
from shardkit.gradients import gradients, norms, unscale
from shardkit.optimizers import reach
from shardkit.owners import Part, raise_together
from shardkit.parameters import sharing
from shardkit.replicated import ReplicatedEngine
from shardkit_fairscale._library import unconfigured_logging

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# What FairScale puts on a parameter, to be taken off again.
_MARKS = ("_is_sharded", "_orig_size", "_fp32_shard", "_fp16_shard", "_full_param_padded")


def build(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> Engine:
    """Return the engine: without a rank to share with, the user's optimizer over whole parameters. Collective."""
    if dist.get_world_size() == 1:
        return ReplicatedEngine("fairscale", model, optimizer, strategy)
    return FullyShardedEngine(model, optimizer, strategy)


@final
class FullyShardedEngine(Engine):
    """The user's module, whose weights FairScale's wrapper splits, and a copy of the optimizer over a rank's runs.

    The first module that runs in a window has the wrapper gather the weights, and they stay until the window's last
    backward is over. FairScale's own hooks reduce a gradient as it comes, so that ranks hang, or add up gradients of
    different parameters, where they use them in another order. Here each is averaged into the runs after the pass, in
    one order on every rank, whichever of the parameters a rank has used.
    """

    optimizer: Optimizer
    whole_gradients = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        self._names: dict[Tensor, str] = {value: name for name, value in model.named_parameters()}
        self._parameters: list[Tensor] = list(self._names)
        self._check(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self._clip = strategy.max_grad_norm
        self._wants_norm = self._clip is not None or strategy.track_grad_norm
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._whole_now = False
        """Whether the parameters are whole, and none need be gathered."""
        with unconfigured_logging(), _quietly():
            self._wrapper: Any = FullyShardedDataParallel(
                model,
                process_group=dist.group.WORLD,
                process_group_reduce_scatter=dist.group.WORLD,
                flatten_parameters=False,
                compute_dtype=torch.float32,
                bucket_cap_mb=0,
                compute_device=self._parameters[0].device,
            )
            # What its forward would begin with, but for the buffers, which it would cast.
            self._wrapper._cast_buffers = lambda *_, **__: None
            self._wrapper._lazy_init()
        self._runs = {value: _Run(value, self._rank) for value in self._parameters}
        self._part = Part("fairscale", optimizer, self._names)
        groups = [
            [self._runs[value].values for value in group["params"] if len(self._runs[value].values)]
            for group in optimizer.param_groups
        ]
        self._part.over([{"params": group} for group in groups])
        self._stepped = [values for group in groups for values in group]
        self._carry_over()
        self._handles: list[Any] = []
        for part in model.modules():
            self._handles += [
                part.register_forward_pre_hook(self._gather),
                part.register_state_dict_pre_hook(self._refuse),
                part.register_load_state_dict_pre_hook(self._begin_load),
                part.register_load_state_dict_post_hook(self._end_load),
            ]
            # A copy would have these hooks, and only runs of the weights.
            part.__dict__["__reduce_ex__"] = self._refuse_copy

    def _carry_over(self) -> None:
        """Split the state that the user's optimizer brings. Collective."""
        self._part.carry_over(lambda _: self._rank)
        state = self.stepper.state
        for value in [key for key in state if key in self._runs]:
            run, entries = self._runs[value], state.pop(value)
            if len(run.values):
                state[run.values] = {
                    key: run.of(entry).clone()
                    if isinstance(entry, torch.Tensor) and entry.shape == run.shape
                    else entry
                    for key, entry in entries.items()
                }

    def _check(self, model: nn.Module, optimizer: Optimizer) -> None:
        for value, name in self._names.items():
            if value.dtype != torch.float32:
                raise UnsupportedError(
                    f"backend 'fairscale' with shard=parameters splits parameters of float32, and {name!r} is of "
                    f"{value.dtype}: use the strategy 'ddp' or 'fsdp'"
                )
        for name, part in model.named_modules():
            if getattr(part, "sparse", False) is True:
                raise UnsupportedError(
                    f"backend 'fairscale' can't average the sparse gradients of {name or 'the module'!r} "
                    f"({type(part).__name__}): give it sparse=False, or use the strategy 'ddp'"
                )
        pair = sharing({name: value for value, name in self._names.items()})
        if pair is not None:
            raise UnsupportedError(
                f"backend 'fairscale' splits parameters, and {pair[0]!r} and {pair[1]!r} share memory, which would "
                "part: make them one parameter, or use the strategy 'ddp'"
            )
        found = reach(optimizer)
        if found.unit != "element":
            raise UnsupportedError(
                f"backend 'fairscale' with shard=parameters cuts parameters anywhere, and {type(optimizer).__name__} "
                f"{found.cause}: use the strategy 'fairscale' or 'ddp'"
            )

    @torch.no_grad()
    def _gather(self, *_: Any) -> None:
        if not self._whole_now:
            with _quietly():
                self._wrapper._rebuild_full_params()
            self._whole_now = True

    def _release(self) -> None:
        """Have the parameters be their runs again, and give up what was gathered."""
        if self._whole_now:
            self._whole_now = False
            self._wrapper._use_fp32_param_shard()
            with _quietly():
                self._wrapper._free_full_params()

    def _refuse(self, *_: Any) -> None:
        if not self._whole_now:
            raise UnsupportedError(
                "backend 'fairscale' with shard=parameters keeps a part of the weights in the module between windows: "
                "session.full_weights() gives all, and within session.evaluate() they are whole"
            )

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "a module under backend 'fairscale' with shard=parameters can't be copied: session.full_weights() gives "
            "the weights for a fresh one"
        )

    @torch.no_grad()
    def _begin_load(self, part: nn.Module, *_: Any) -> None:
        for value in part._parameters.values():
            if value is not None and not self._whole_now:
                run = self._runs[value]
                whole = value.new_zeros(run.shape)
                # What isn't loaded stays as it is.
                run.of(whole).copy_(run.values)
                value.data = whole

    @torch.no_grad()
    def _end_load(self, part: nn.Module, _: Any) -> None:
        for value in part._parameters.values():
            if value is not None:
                run = self._runs[value]
                run.values.copy_(run.of(value))
                if not self._whole_now:
                    value.data = run.held

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        # Each rank gathers once in a window, also one whose loss came from no module.
        self._gather()
        loss.backward(gradient)
        if last:
            self._average()
            if self.loss_scale != 1.0:
                unscale(gradients(run.values for run in self._runs.values()), self.loss_scale)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients into the runs. Collective."""
        whole = {value: value.grad for value in self._parameters}
        for value in self._parameters:
            value.grad = None
        self._release()
        sparse = [self._names[value] for value, grad in whole.items() if grad is not None and grad.is_sparse]
        told = torch.tensor(
            [*(grad is not None for grad in whole.values()), bool(sparse)],
            dtype=torch.uint8,
            device=self._parameters[0].device,
        )
        dist.all_reduce(told, dist.ReduceOp.MAX)
        *used, refused = told.tolist()
        if refused:
            name = next(iter(sparse), None)
            words = f"backend 'fairscale' can't average the sparse gradient of {name!r}: use the strategy 'ddp'"
            raise_together(None if name is None else UnsupportedError(words))
        for value, flag in zip(self._parameters, used, strict=True):
            run = self._runs[value]
            if not flag:
                run.values.grad = None
                continue
            padded = value.new_zeros(run.padded * self._world)
            if (grad := whole.pop(value)) is not None:
                padded[: run.elements] = grad.reshape(-1)
            own = value.new_empty(run.padded)
            if run.padded:
                dist.reduce_scatter_single(own, padded)
            run.values.grad = own.div_(self._world)[: len(run.values)]

    def step(self) -> Update:
        trained = gradients(self._stepped)
        squares = norms(trained).double().square().sum().to(self._parameters[0].device)
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        applied = norm - norm == 0.0
        if applied:
            if self._clip is not None and trained:
                total = torch.tensor(norm, device=trained[0].device)
                nn.utils.clip_grads_with_norm_([v for v in self._stepped if v.grad is not None], self._clip, total)
            self._part.begin()
            self.stepper.step()
            self._part.end()
        self.restart()
        return Update(applied, norm if self._wants_norm else None)

    def full_gradients(self) -> dict[str, Tensor]:
        return {
            name: self._whole(self._runs[value], run.grad).cpu()
            for value, name in self._names.items()
            if (run := self._runs[value].values).grad is not None
        }

    def gradient_shards(self) -> list[Shard]:
        runs = ((self._names[value], run) for value, run in self._runs.items())
        return [Shard(name, run.start, run.values.grad) for name, run in runs if run.values.grad is not None]

    def full_weights(self) -> dict[str, Tensor]:
        with self.gathered():
            return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        before = self._whole_now
        self._gather()
        try:
            yield
        finally:
            if not before:
                self._release()

    @torch.no_grad()
    def _whole(self, run: _Run, values: Tensor | None) -> Tensor:
        """Return the whole tensor of which each rank has a run. Collective."""
        assert values is not None
        own = values.new_zeros(run.padded)
        own[: len(values)] = values.detach()
        whole = values.new_empty(run.padded * self._world)
        if run.padded:
            dist.all_gather_single(whole, own)
        return whole[: run.elements].view(run.shape).clone()

    @property
    def stepper(self) -> Optimizer:
        return self._part.stepper

    def weight_shards(self) -> list[Shard]:
        return [Shard(self._names[value], run.start, run.values.detach()) for value, run in self._runs.items()]

    def state_shards(self) -> list[Shard]:
        names = {id(run.values): (self._names[value], run.start) for value, run in self._runs.items()}
        return [Shard(*names[id(values)], values) for values in self._stepped]

    def restart(self) -> None:
        for value, run in self._runs.items():
            value.grad = run.values.grad = None
        self._release()

    def close(self) -> None:
        self.restart()
        with torch.no_grad():
            for value, run in self._runs.items():
                whole = self._whole(run, run.values)
                for mark in _MARKS:
                    value.__dict__.pop(mark, None)
                value.data = whole
        for handle in self._handles:
            handle.remove()
        for part in self.model.modules():
            for mark in ("__reduce_ex__", "_unflattened_param_views"):
                part.__dict__.pop(mark, None)
        self.stepper.state.clear()


class _Run:
    """What a rank has of a parameter: a piece of its elements, as long as that of any rank but for the last ones."""

    def __init__(self, value: Any, rank: int) -> None:
        self.shape: torch.Size = value._orig_size
        self.elements = self.shape.numel()
        self.held: Tensor = value._fp32_shard
        """What FairScale gathers from: the values, and what fills them up."""
        self.padded = self.held.numel()
        self.start = min(rank * self.padded, self.elements)
        count = min(self.padded, self.elements - self.start)
        self.values: Tensor = self.held[:count].detach().requires_grad_()

    def of(self, whole: Tensor) -> Tensor:
        """Return this run of a whole tensor."""
        return whole.view(-1)[self.start : self.start + len(self.values)]


@contextmanager
def _quietly() -> Iterator[None]:
    """Return a context in which torch doesn't say that FairScale uses what is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        warnings.filterwarnings("ignore", ".*_all_gather_base.*")
        yield
