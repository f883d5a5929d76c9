"""The reference: one process that trains on the whole global batch, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardkit._random import seed_everything
from shardkit.parity._batch import fingerprint
from shardkit.parity._sketch import ABSENT, SQUARE, WIDTH, Run, Sketcher
from shardkit.parity._trace import Trace
from shardkit.parity._work import Task
from shardkit.tools._trial import mapped
from shardkit.workloads import Workload


class _InFloat64(TorchFunctionMode):
    """Has a model compute in float64 where it asks for float32 itself, as normalizations and softmaxes do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        given = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **given)


def train_reference(task: Task, make: Callable[[], Workload]) -> None:
    """Train the work's whole global batch, micro-batch by micro-batch, and write the trace."""
    work = task.work
    workload = make()
    model, optimizer = workload.model.double().train(), workload.optimizer
    if work.seed is not None:
        seed_everything(work.seed)
    names = [name for name, _ in model.named_parameters()]
    values = [value for _, value in model.named_parameters()]
    sketcher = Sketcher([Run(0, value.numel(), value.numel()) for value in values], torch.device("cpu"))
    weights, gradients, losses, data, rates = [sketcher(values)], [], [], [], []
    batches = workload.batches(work.batch_size)
    count = work.processes * work.accumulate
    for _ in range(work.steps):
        window = list(islice(batches, count))
        data.append([[fingerprint(batch) for batch in window]])
        told = []
        for batch in window:
            loss = _loss(workload, _double(batch))
            (loss / count).backward()
            told.append(float(loss))
        losses.append([told])
        rows = torch.zeros(len(names), WIDTH, dtype=torch.float64)
        rows[:, SQUARE] = ABSENT
        held = [at for at, value in enumerate(values) if value.grad is not None]
        some = Sketcher([Run(0, values[at].numel(), values[at].numel()) for at in held], torch.device("cpu"))
        rows[held] = some([values[at].grad.to_dense() for at in held])  # type: ignore[union-attr]
        gradients.append(rows.unsqueeze(0))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        if work.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(values, work.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        weights.append(sketcher(values))
        with Path(task.progress).open("ab") as file:
            file.write(b".")
    facts = {
        "reference": True,
        "strategy": "reference",
        "world_size": 1,
        "parameters": {
            name: {"shape": list(value.shape), "trainable": value.requires_grad}
            for name, value in model.named_parameters()
        },
    }
    Trace(
        facts,
        losses=torch.tensor(losses, dtype=torch.float64),
        batches=torch.tensor(data, dtype=torch.int64),
        rates=torch.tensor(rates, dtype=torch.float64),
        applied=torch.ones(work.steps, dtype=torch.bool),
        seconds=torch.zeros(work.steps, 1, dtype=torch.float64),
        gradients=torch.stack(gradients),
        weights=torch.stack(weights).unsqueeze(1),
        final_weights={name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
    ).save(task.trace)


def _loss(workload: Workload, batch: Any) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            return workload.loss(workload.model, batch)
    finally:
        torch.set_default_dtype(before)


def _double(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in float64."""
    return mapped(batch, lambda value: value.double() if value.is_floating_point() else value)
