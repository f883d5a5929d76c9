"""The backend of docs/examples with a fault, one for each variant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardkit import Backend, Variant, hookimpl, option

FAULTS = (
    "none",
    "sums",
    "last-micro-batch",
    "zeros-for-none",
    "norm-of-one-rank",
    "scaled",
    "other-words",
    "rank-1-waits",
    "rank-1-ends",
    "wrong-on-rank-1",
    "no-state",
    "leaks",
    "large-left-out",
    "no-hooks",
    "bf16",
    "hook-left",
)


@dataclass(frozen=True)
class Options:
    fault: str = option("none", "what is wrong")
    bucket_mb: float = option(25.0, "size of a bucket", unit="MiB")


@hookimpl
def shardkit_describe() -> Backend:
    # What is declared to be split is held whole: the example splits nothing.
    variants = [Variant(strategy=f"planted:fault={fault}", summary=fault) for fault in FAULTS]
    shards = frozenset({"gradients", "optimizer"})
    return Backend(
        name="planted",
        summary="has a fault",
        variants=(*variants, Variant(strategy="planted:bucket_mb=1", summary="claims to split", shards=shards)),
        precisions=frozenset({"fp32", "fp16"}),
        options=Options,
    )


@hookimpl
def shardkit_prepare(model: Any, optimizer: Any, strategy: Any, options: Options) -> Any:
    if optimizer is None:
        return None
    import torch
    import torch.distributed as dist
    from shardkit_allreduce._engine import AllreduceEngine

    from shardkit import Update
    from shardkit.errors import UnsupportedError
    from shardkit.gradients import gradients, total_norm

    fault, rank = options.fault, dist.get_rank()

    class Faulty(AllreduceEngine):  # type: ignore[misc]
        def backward(self, loss: Any, gradient: Any, *, last: bool) -> None:
            if fault == "rank-1-ends" and rank == 1:
                os._exit(3)
            if fault == "leaks":
                _LEAKED.append(torch.ones(512))
            if fault == "last-micro-batch":
                for value in self._parameters.values():
                    value.grad = None
            if fault == "scaled":
                self.loss_scale, scale = 1.0, self.loss_scale
            try:
                super().backward(loss, gradient, last=last)
            except UnsupportedError as error:
                other = f", on rank {rank}" if fault == "other-words" else ""
                raise UnsupportedError(str(error).replace("allreduce", "planted") + other) from None
            if fault == "scaled":
                self.loss_scale = scale
            if last and fault == "zeros-for-none":
                for value in self._parameters.values():
                    value.grad = torch.zeros_like(value) if value.grad is None else value.grad
            if last and fault == "wrong-on-rank-1" and rank == 1:
                torch._foreach_mul_(gradients(self._parameters.values()), 1.5)

        def _average(self) -> None:
            if fault == "rank-1-waits" and rank == 1:
                dist.barrier()
                dist.barrier()
            own = total_norm(gradients(self._parameters.values())).item()
            large = [value for value in self._parameters.values() if value.numel() > 4096]
            kept = [None if value.grad is None else value.grad.clone() for value in large]
            if fault == "bf16":
                for value in gradients(self._parameters.values()):
                    value.copy_(value.bfloat16())
            super()._average()
            if fault == "large-left-out":
                for value, gradient in zip(large, kept, strict=True):
                    value.grad = gradient
            if fault == "sums":
                torch._foreach_mul_(gradients(self._parameters.values()), dist.get_world_size())
            self._own_norm = own

        def step(self) -> Any:
            update = super().step()
            if fault == "norm-of-one-rank" and update.grad_norm is not None:
                return Update(update.applied, self._own_norm)
            return update

        def state_shards(self) -> Any:
            return [] if fault == "no-state" else super().state_shards()

    if fault == "hook-left":
        model.register_forward_hook(_look)
    engine = Faulty(model, optimizer, strategy, options)
    if fault == "no-hooks":
        engine._optimizer_step = optimizer.step.__wrapped__.__get__(optimizer)
    return engine


_LEAKED: list[Any] = []


def _look(module: Any, arguments: Any, output: Any) -> None:
    """See an output."""
