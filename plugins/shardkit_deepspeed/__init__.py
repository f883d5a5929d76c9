"""DeepSpeed's ZeRO, stages 0 to 3, with offload of optimizer and parameters to host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit import Backend, Engine, Finding, Footprint, Imported, ModelSize, Source, Strategy, Variant, hookimpl
from shardkit_deepspeed._keys import TOP_LEVEL
from shardkit_deepspeed._options import DeepSpeedOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_OPTIMIZER = frozenset({"optimizer"})
_GRADIENTS = frozenset({"optimizer", "gradients"})
_ALL = frozenset({"optimizer", "gradients", "parameters"})


@hookimpl
def shardkit_describe() -> Backend:
    return Backend(
        name="deepspeed",
        summary="DeepSpeed's ZeRO, stages 0 to 3, with offload to host memory",
        variants=(
            Variant(strategy="deepspeed:stage=0", summary="shards nothing; gradients are averaged after backward"),
            Variant(strategy="deepspeed:stage=1", summary="shards the optimizer's state", shards=_OPTIMIZER),
            Variant(strategy="deepspeed:stage=2", summary="shards gradients and optimizer", shards=_GRADIENTS),
            Variant(strategy="deepspeed:stage=3", summary="shards parameters, gradients and optimizer", shards=_ALL),
            Variant(
                strategy="deepspeed:stage=1,offload_optimizer=cpu",
                summary="stage 1 with the optimizer's state and step in host memory",
                shards=_OPTIMIZER,
                offloads=_OPTIMIZER,
            ),
            Variant(
                strategy="deepspeed:stage=2,offload_optimizer=cpu",
                summary="stage 2 with the optimizer's state and step in host memory",
                shards=_GRADIENTS,
                offloads=_OPTIMIZER,
            ),
            Variant(
                strategy="deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu",
                summary="stage 3 with optimizer and parameters in host memory",
                shards=_ALL,
                offloads=frozenset({"optimizer", "parameters"}),
            ),
        ),
        library="deepspeed",
        # Below 0.19.8 stage 3 over gloo is a race that gives wrong numbers silently.
        requires="deepspeed>=0.19.8",
        install='pip install "shardkit[deepspeed]"',
        devices=frozenset({"cpu", "cuda"}),
        precisions=frozenset({"fp32", "bf16", "fp16"}),
        options=DeepSpeedOptions,
        config_keys=TOP_LEVEL,
        environment=("DS_", "DEEPSPEED_", "LOCAL_SIZE"),
    )


@hookimpl
def shardkit_prepare(
    model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: DeepSpeedOptions
) -> Engine | None:
    from shardkit_deepspeed._build import build

    return build(model, optimizer, strategy, options)


@hookimpl
def shardkit_control(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: DeepSpeedOptions) -> Engine:
    from shardkit_deepspeed._control import build

    return build(model, optimizer, strategy, options)


@hookimpl
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: DeepSpeedOptions) -> Footprint:
    from shardkit_deepspeed._footprint import footprint

    return footprint(model, strategy, options)


@hookimpl
def shardkit_diagnose() -> list[Finding]:
    from shardkit_deepspeed._diagnose import diagnose

    return diagnose()


@hookimpl
def shardkit_import(source: Source) -> Imported | None:
    from shardkit_deepspeed._import import read

    return read(source)
