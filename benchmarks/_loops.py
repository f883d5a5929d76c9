"""The loops that are compared: by hand over a raw library, under a peer's wrapper, and under shardkit.

Each builder takes a workload and what a window is, and returns one micro-step as a function of a batch.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.utils import clip_grad_norm_

import shardkit
from shardkit import Workload


@dataclass(frozen=True)
class Window:
    """How many micro-batches make a step, the norm that its gradient is clipped to, and what the forward runs in."""

    accumulate: int = 1
    max_grad_norm: float | None = None
    precision: str = "fp32"


LIBRARIES = ("transformers.models.t5.modeling_t5", "fairscale.nn", "deepspeed", "accelerate", "lightning_fabric")
"""What the loops import, where it is installed."""

Loop = Callable[[Any], None]
Builder = Callable[[Workload, Window], Loop]


@dataclass(frozen=True)
class Arm:
    """A loop by name, and what builds it."""

    name: str
    build: Builder


def plain(workload: Workload, window: Window) -> Loop:
    """Build the loop of torch alone."""
    return _by_hand(workload, window, workload.model, workload.optimizer)


def ddp(**settings: Any) -> Builder:
    """Return the builder of a loop over DistributedDataParallel with these settings."""

    def build(workload: Workload, window: Window) -> Loop:
        model = torch.nn.parallel.DistributedDataParallel(workload.model, **settings)
        return _by_hand(workload, window, model, workload.optimizer, no_sync=model.no_sync)

    return build


def oss(*, sharded: bool, **settings: Any) -> Builder:
    """Return the builder of a loop over FairScale's OSS, with ShardedDDP or DistributedDataParallel."""

    def build(workload: Workload, window: Window) -> Loop:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        kind = type(workload.optimizer)
        group = workload.optimizer.param_groups[0]
        optimizer = OSS(group["params"], optim=kind, **{name: group[name] for name in ("lr", "fused")})
        if not sharded:
            model = torch.nn.parallel.DistributedDataParallel(workload.model, **settings)
            return _by_hand(workload, window, model, optimizer, no_sync=model.no_sync)
        model = ShardedDataParallel(workload.model, optimizer, **settings)
        return _by_hand(
            workload,
            window,
            model,
            optimizer,
            no_sync=model.no_sync,
            clip=optimizer.clip_grad_norm,
            # The optimizer's own would detach the gradients from the buckets, and train on un-averaged ones.
            zero_grad=lambda: model.zero_grad(set_to_none=True),
        )

    return build


def zero(*, views: bool) -> Builder:
    """Return the builder of a loop over torch's ZeroRedundancyOptimizer and DistributedDataParallel."""

    def build(workload: Workload, window: Window) -> Loop:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = type(workload.optimizer)
        group = workload.optimizer.param_groups[0]
        settings = {name: group[name] for name in ("lr", "fused")}
        model = torch.nn.parallel.DistributedDataParallel(workload.model, gradient_as_bucket_view=views)
        optimizer = ZeroRedundancyOptimizer(group["params"], kind, parameters_as_bucket_view=views, **settings)
        return _by_hand(workload, window, model, optimizer, no_sync=model.no_sync)

    return build


def deepspeed(stage: int, *, best: bool, offload_optimizer: bool = False, offload_parameters: bool = False) -> Builder:
    """Return the builder of a loop over ``deepspeed.initialize``, with the best settings measured or its defaults."""
    bucket = 1_000_000
    settings: dict[str, Any] = {"stage": stage}
    if best:
        settings |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": False}
    if best and stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "sub_group_size": bucket,
        }
    if offload_optimizer:
        settings["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        settings["offload_param"] = {"device": "cpu"}

    def build(workload: Workload, window: Window) -> Loop:
        import deepspeed as library

        # Never used here, and compiled at the first start otherwise.
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        library.utils.logger.setLevel("ERROR")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": window.accumulate,
            "gradient_clipping": window.max_grad_norm or 0.0,
            "zero_optimization": settings,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = library.initialize(model=workload.model, optimizer=workload.optimizer, config=config)
        loss = workload.loss

        def step(batch: Any) -> None:
            engine.backward(loss(engine, batch))
            engine.step()

        return step

    return build


def accelerate(workload: Workload, window: Window) -> Loop:
    """Build the loop under accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window.accumulate)
    model, optimizer = accelerator.prepare(workload.model, workload.optimizer)
    loss, max_norm = workload.loss, window.max_grad_norm

    def step(batch: Any) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return step


def fabric(workload: Workload, window: Window) -> Loop:
    """Build the loop under lightning-fabric."""
    from lightning_fabric import Fabric

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    wrapper = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    wrapper.launch()
    model, optimizer = wrapper.setup(workload.model, workload.optimizer)
    loss, accumulate, max_norm = workload.loss, window.accumulate, window.max_grad_norm
    micro = 0

    def whole(batch: Any) -> None:
        wrapper.backward(loss(model, batch))
        if max_norm is not None:
            wrapper.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def part(batch: Any) -> None:
        nonlocal micro
        micro += 1
        with wrapper.no_backward_sync(model, enabled=micro < accumulate):
            wrapper.backward(loss(model, batch) / accumulate)
        if micro == accumulate:
            micro = 0
            if max_norm is not None:
                wrapper.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return whole if accumulate == 1 else part


def mixed(workload: Workload, window: Window) -> Loop:
    """Build the loop of torch alone with autocast and, for fp16, torch's own GradScaler."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[window.precision]
    scaler = torch.amp.GradScaler("cpu", enabled=window.precision == "fp16")
    model, optimizer, loss, max_norm = workload.model, workload.optimizer, workload.loss, window.max_grad_norm

    def step(batch: Any) -> None:
        with torch.autocast("cpu", dtype):
            value = loss(model, batch)
        scaler.scale(value).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def session(strategy: str) -> Builder:
    """Return the builder of the loop under shardkit."""

    def build(workload: Workload, window: Window) -> Loop:
        prepared = _prepared(strategy, workload, window)
        model, loss = prepared.model, workload.loss

        def step(batch: Any) -> None:
            prepared.backward(loss(model, batch))
            prepared.step()

        step.close = prepared.close  # type: ignore[attr-defined]
        return step

    return build


def session_where(module: str, name: str, value: int, strategy: str) -> Builder:
    """Return the builder of the loop under shardkit with another value of this constant of a module."""

    def build(workload: Workload, window: Window) -> Loop:
        place = importlib.import_module(module)
        with mock.patch.object(place, name, value):
            inner = session(strategy)(workload, window)

        def step(batch: Any) -> None:
            with mock.patch.object(place, name, value):
                inner(batch)

        return step

    return build


def recorded(strategy: str) -> Builder:
    """Return the builder of the loop under shardkit while a trace of it is recorded, at the default detail."""

    def build(workload: Workload, window: Window) -> Loop:
        prepared = _prepared(strategy, workload, window)
        model, loss = prepared.model, workload.loss
        # Open for as long as the benchmark runs.
        recording = shardkit.parity.record(prepared, None)
        recording.__enter__()

        def step(batch: Any) -> None:
            prepared.backward(loss(model, batch))
            prepared.step()

        return step

    return build


def windows(strategy: str, weight: Callable[[Any], float] | None = None) -> Builder:
    """Return the builder of the loop under shardkit over ``session.windows``, without weights or with."""

    def build(workload: Workload, window: Window) -> Loop:
        prepared = _prepared(strategy, workload, window)
        model, loss = prepared.model, workload.loss
        given: list[Any] = []

        def loader() -> Iterator[Any]:
            while True:
                yield given[0]

        passes = iter(prepared.windows(loader(), weight=weight))
        batches: Iterator[Any] = iter(())

        def step(batch: Any) -> None:
            nonlocal batches
            if not given:
                given.append(batch)
            own = next(batches, None)
            if own is None:
                batches = iter(next(passes))
                own = next(batches)
            prepared.backward(loss(model, own))
            prepared.step()

        return step

    return build


def _prepared(strategy: str, workload: Workload, window: Window) -> shardkit.Session:
    plan = dataclasses.replace(shardkit.Strategy.parse(strategy), **dataclasses.asdict(window))
    return shardkit.prepare(workload.model, workload.optimizer, plan)


def _by_hand(
    workload: Workload,
    window: Window,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    no_sync: Callable[[], AbstractContextManager[None]] | None = None,
    clip: Callable[[float], Any] | None = None,
    zero_grad: Callable[[], None] | None = None,
) -> Loop:
    loss, accumulate, max_norm = workload.loss, window.accumulate, window.max_grad_norm
    clip = clip or (lambda norm: clip_grad_norm_(model.parameters(), norm))
    zero_grad = zero_grad or optimizer.zero_grad
    micro = 0

    # Not shared with ``part``: by hand nobody would pay for a call here.
    def whole(batch: Any) -> None:
        loss(model, batch).backward()
        if max_norm is not None:
            clip(max_norm)
        optimizer.step()
        zero_grad()

    def part(batch: Any) -> None:
        nonlocal micro
        micro += 1
        if micro == accumulate:
            micro = 0
            (loss(model, batch) / accumulate).backward()
            if max_norm is not None:
                clip(max_norm)
            optimizer.step()
            zero_grad()
        elif no_sync is None:
            (loss(model, batch) / accumulate).backward()
        else:
            with no_sync():
                (loss(model, batch) / accumulate).backward()

    return whole if accumulate == 1 else part


def built(arm: Arm, workload: Workload, window: Window) -> Loop:
    """Return the arm's loop; what the libraries say of each other stays unsaid."""
    warnings.simplefilter("ignore")
    return arm.build(workload, window)


def ready(
    arms: list[Arm], workload: Callable[[], Workload], window: Window, batch: int | Mapping[str, int]
) -> tuple[dict[str, Callable[[], None]], Callable[[str], None]]:
    """Return each arm's micro-step on a workload of its own, and what to call with an arm's name before it runs.

    ``batch`` is that of all arms, or of each by its name.
    """
    steps: dict[str, Callable[[], None]] = {}
    linears = {}
    for arm in arms:
        made = workload()
        size = batch if isinstance(batch, int) else batch[arm.name]
        steps[arm.name] = partial(built(arm, made, window), next(made.batches(size)))
        linears[arm.name] = torch.nn.functional.linear

    def before(name: str) -> None:
        # DeepSpeed's stage 3 replaces it for the whole process: each arm has the one that it would have alone.
        torch.nn.functional.linear = linears[name]

    return steps, before


# The raw loop for each strategy, at the settings of its library that were measured best for memory.
BEST: dict[str, Builder] = {
    "ddp": ddp(gradient_as_bucket_view=True, static_graph=True),
    "fairscale": oss(sharded=True, reduce_buffer_size=0),
    "fairscale:shard=optimizer": oss(sharded=False, gradient_as_bucket_view=True),
    "zero": zero(views=True),
    "deepspeed:stage=0": deepspeed(0, best=True),
    "deepspeed:stage=1": deepspeed(1, best=True),
    "deepspeed:stage=2": deepspeed(2, best=True),
    "deepspeed:stage=3": deepspeed(3, best=True),
    "deepspeed:stage=1,offload_optimizer=cpu": deepspeed(1, best=True, offload_optimizer=True),
    "deepspeed:stage=2,offload_optimizer=cpu": deepspeed(2, best=True, offload_optimizer=True),
    "deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu": deepspeed(
        3, best=True, offload_optimizer=True, offload_parameters=True
    ),
}

# The same at the library's own defaults.
DEFAULT: dict[str, Builder] = {
    "ddp": ddp(),
    "fairscale": oss(sharded=True),
    "fairscale:shard=optimizer": oss(sharded=False),
    "zero": zero(views=False),
    "deepspeed:stage=0": deepspeed(0, best=False),
    "deepspeed:stage=1": deepspeed(1, best=False),
    "deepspeed:stage=2": deepspeed(2, best=False),
    "deepspeed:stage=3": deepspeed(3, best=False),
    "deepspeed:stage=1,offload_optimizer=cpu": deepspeed(1, best=False, offload_optimizer=True),
    "deepspeed:stage=2,offload_optimizer=cpu": deepspeed(2, best=False, offload_optimizer=True),
    "deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu": deepspeed(
        3, best=False, offload_optimizer=True, offload_parameters=True
    ),
}

PEERS: dict[str, Builder] = {"accelerate": accelerate, "lightning-fabric": fabric}
