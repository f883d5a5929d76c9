"""What a model, an optimizer and a loss must be before anything is built on them."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._backend import Backend, Variant
from shardkit._strategy import Strategy
from shardkit.errors import InputError, UnsupportedError
from shardkit.optimizers import reach


def check_model(model: Any) -> torch.device:
    """Return the one device on which the model lies.

    Raises:
        InputError: it is no module, has no parameters, lies on the meta device or on several, or has a SyncBatchNorm
            on the CPU.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError("the model is wrapped in DistributedDataParallel already: hand over the module inside it")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if next(model.parameters(), None) is None:
        raise InputError(f"the model {type(model).__name__} has no parameters: there is nothing to train or to shard")
    lazy = [name for name, value in tensors.items() if nn.parameter.is_lazy(value)]
    if lazy:
        raise InputError(f"{lazy[0]!r} is not initialized yet: run one forward pass before prepare")
    devices: dict[torch.device, str] = {}
    for name, value in tensors.items():
        devices.setdefault(value.device, name)
    if len(devices) > 1:
        spread = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise InputError(f"the model lies on several devices ({spread}): move it to one with model.to(device)")
    device = next(iter(devices))
    if device.type == "cpu":
        for name, part in model.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise InputError(
                    f"{name!r} is a SyncBatchNorm, which torch computes on GPUs only: move the model to one, or give "
                    "it a BatchNorm, whose statistics are rank 0's after each step"
                )
    if device.type == "meta":
        raise InputError("the model is on the meta device: it has no values; give it some with model.to_empty(...)")
    return device


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise unless the optimizer updates parameters of this model, each once, without a closure.

    Raises:
        InputError: it is no torch optimizer, has no parameters, has one twice, or has one that isn't the model's.
        UnsupportedError: its ``step`` needs a closure.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"the optimizer is a torch.optim.Optimizer or None, not a {type(optimizer).__name__}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not given:
        raise InputError("the optimizer has no parameters: build it on model.parameters()")
    foreign = [tuple(parameter.shape) for parameter in given if id(parameter) not in names]
    if foreign:
        raise InputError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's, the first of shape {foreign[0]}: "
            "build it on the model that you prepare, after any change of its parameters"
        )
    twice = [names[key] for key, count in Counter(map(id, given)).items() if count > 1]
    if twice:
        raise InputError(f"the optimizer holds parameter {twice[0]!r} more than once: list each parameter once")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} calls the model again within its step, through a closure; a session owns the "
            "order of backward and step, so that it trains under no strategy: use one whose step needs none, such as "
            "torch.optim.AdamW"
        )


def check_repeatable(backend: Backend, optimizer: Optimizer) -> None:
    """Raise where replicas of the weights would part, since each rank's optimizer draws its own random numbers.

    Raises:
        UnsupportedError: it draws from torch's default generator.
    """
    if reach(optimizer).random:
        raise UnsupportedError(
            f"{type(optimizer).__name__} draws random numbers in its step, others on each rank, so that the ranks' "
            f"weights would part, under backend {backend.name!r} as under any other: have it draw from a "
            "torch.Generator of its own, seeded alike on every rank, or train in one process"
        )


def check_fit(backend: Backend, strategy: Strategy, device: torch.device) -> None:
    """Raise unless the backend declares what is asked of it.

    Raises:
        UnsupportedError: it doesn't run on the device, or not in the precision.
    """
    if device.type not in backend.devices:
        raise UnsupportedError(f"backend {backend.name!r} runs on {_either(backend.devices)}, not on {device.type}")
    variant = variant_of(backend, strategy)
    if variant.devices is not None and device.type not in variant.devices:
        elsewhere = f": {variant.elsewhere}" if variant.elsewhere else ""
        raise UnsupportedError(
            f"strategy {variant.strategy!r} of backend {backend.name!r} runs on {_either(variant.devices)}, not on "
            f"{device.type}{elsewhere}"
        )
    if strategy.precision not in backend.precisions:
        raise UnsupportedError(
            f"backend {backend.name!r} trains in {_either(backend.precisions)}, not in {strategy.precision}"
        )


def variant_of(backend: Backend, strategy: Strategy) -> Variant:
    """Return the variant that a strategy is one of, going by its options; the backend's first where it is none."""
    texts = {variant: Strategy.parse(variant.strategy).options for variant in backend.variants}
    asked = {name: str(value) for name, value in strategy.options.items()}
    fitting = [variant for variant, options in texts.items() if options.items() <= asked.items()]
    return max(fitting, key=lambda variant: len(texts[variant]), default=backend.variants[0])


def checked_loss(loss: Any) -> Tensor:
    """Return the loss as a tensor without dimensions, if one can back-propagate from it.

    Raises:
        InputError: it is no tensor, no scalar, or has no graph.
    """
    if type(loss) is Tensor and loss.requires_grad and loss.dim() == 0 and loss.is_floating_point():
        return loss
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss is a tensor, not a {type(loss).__name__}")
    if loss.dim() != 0 and loss.numel() != 1:
        raise InputError(f"the loss is a scalar, not of shape {tuple(loss.shape)}: reduce it with .mean()")
    if not loss.requires_grad:
        raise InputError(
            "the loss has no gradient: it was computed without grad, or from no parameter that requires one"
        )
    if not loss.is_floating_point():
        raise InputError(f"the loss is a real floating-point number, not {loss.dtype}")
    return loss.reshape(())


def fingerprint(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return what must be the same on every rank about what was handed over, in words for an error."""
    parameters = {name: _described(value) for name, value in model.named_parameters()}
    buffers = {name: _described(value) for name, value in model.named_buffers()}
    facts: dict[str, Any] = {
        "class of the model": type(model).__qualname__,
        "parameters": parameters,
        "order of parameters": list(parameters) if len(parameters) < 1000 else _digest(list(parameters)),
        "buffers": buffers,
        "class of the optimizer": type(optimizer).__qualname__,
    }
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            facts[f"parameters of group {index}"] = [names.get(id(value)) for value in group["params"]]
            facts[f"settings of group {index}"] = settings_of(group)
    return facts


def settings_of(group: dict[str, Any]) -> dict[str, str]:
    """Return a parameter group's settings in words: equal where they are, whatever their types."""
    return {
        key: repr(value.tolist() if isinstance(value, Tensor) else value)
        for key, value in group.items()
        if key != "params" and not (isinstance(value, Tensor) and value.numel() > 16)
    }


def facts_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's groups, as facts that must be the same on every rank."""
    groups = optimizer.param_groups
    return {f"settings of group {index} of the optimizer": settings_of(group) for index, group in enumerate(groups)}


def _described(value: Tensor) -> str:
    frozen = "" if value.requires_grad or not isinstance(value, nn.Parameter) else ", frozen"
    return f"{tuple(value.shape)} of {value.dtype}{frozen}"


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _either(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))
