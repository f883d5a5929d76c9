"""The reference: one process, plain torch, the whole global batch; nothing of shardkit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from .cells import MAX_GRAD_NORM, STEPS, Cell, Trace, copied
from .models import Batch


def reference(cell: Cell, world_size: int) -> Trace:
    """Return what a cell's run is in one process."""
    if cell.workload.whole_batch:
        # The global batch is the same however it is split.
        return _trained(replace(cell, accumulate=1), 1)
    return _trained(cell, world_size)


@cache
def _trained(cell: Cell, world_size: int) -> Trace:
    return train(cell, world_size, cell.workload.build(0), whole_batch=cell.workload.whole_batch)


def train(
    cell: Cell,
    world_size: int,
    module: nn.Module,
    *,
    whole_batch: bool,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """Train a module, from the global batch at once or from the parts that each of ``world_size`` ranks would have."""
    torch.set_num_threads(1)
    module.to(dtype)
    optimizer = cell.build_optimizer(module)
    trace = Trace([], [], [], {}, [])
    for step in range(steps):
        if whole_batch:
            loss = cell.workload.loss(module, _cast(cell.workload.batch(step), dtype))
            loss.backward()
            trace.losses.append([loss.item()])
        else:
            trace.losses.append(_by_parts(cell, world_size, module, step, dtype))
        gradients = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
        trace.gradients.append(copied(gradients))
        trace.grad_norms.append(get_total_norm([value.double() for value in gradients.values()]).item())
        assert trace.grad_norms[-1] > 1.5 * MAX_GRAD_NORM, f"{cell}: clipping wouldn't bite in step {step}"
        if cell.max_grad_norm is not None:
            clip_grad_norm_(module.parameters(), cell.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights.update(copied(module.state_dict()))
    module.eval()
    with torch.no_grad():
        trace.evaluations.append(cell.workload.loss(module, _cast(cell.workload.batch(0), dtype)).item())
    return trace


def _by_parts(cell: Cell, world_size: int, module: nn.Module, step: int, dtype: torch.dtype) -> list[float]:
    """Back-propagate the mean loss of the parts; leave the buffers that rank 0 has after its own."""
    workload, parts = cell.workload, world_size * cell.accumulate
    before = copied(dict(module.named_buffers()))
    losses = []
    for rank in reversed(range(world_size)):
        _put(module, before)
        for micro in range(cell.accumulate):
            loss = workload.loss(module, _cast(workload.part(step, rank, world_size, micro, cell.accumulate), dtype))
            (loss / parts).backward()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def _put(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, value in module.named_buffers():
        value.copy_(buffers[name])


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
