"""Whether a batch fits, found out without shardkit: torch's own DDP within a limit that the kernel keeps."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.bench import planted


def fits(batch: int, budget: int) -> bool:
    """Return whether this rank trains four steps; an allocation that is refused ends them."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD
    libc.mallopt(-8, 1)  # M_ARENA_MAX
    dist.init_process_group("gloo")
    _train(1, 2)
    gc.collect()
    libc.malloc_trim(0)
    status = Path("/proc/self/status").read_text().split()
    data = int(status[status.index("VmData:") + 1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + budget, resource.RLIM_INFINITY))
    try:
        _train(batch, 4)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return True


def _train(batch: int, steps: int) -> None:
    workload = planted.sized()
    model = DistributedDataParallel(workload.model, gradient_as_bucket_view=True)
    batches = workload.batches(batch)
    for _ in range(steps):
        workload.loss(model, next(batches)).backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    assert torch.isfinite(next(model.parameters())).all()
