"""The same job on torch alone, from FairScale's file: ZeroRedundancyOptimizer, or fully_shard."""

import argparse

import torch
import torch.distributed as dist
from task import ACCUMULATE, batches_of, build, groups, warmup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


def zero(saved):
    model = build()
    model.load_state_dict(saved["model"])
    optimizer = ZeroRedundancyOptimizer(groups(model), torch.optim.AdamW, lr=1e-3)
    schedule = LambdaLR(optimizer, warmup)  # before the load: to make one sets the rates of its first step
    optimizer.load_state_dict(saved["optimizer"])  # the numbers of OSS are those of the groups, as torch's are
    return DistributedDataParallel(model), optimizer, schedule


def fsdp(saved):
    model = build()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    whole = StateDictOptions(full_state_dict=True)
    named = get_optimizer_state_dict(model, optimizer, options=whole)  # by name, before anything is in parts
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    schedule = LambdaLR(optimizer, warmup)
    set_optimizer_state_dict(model, optimizer, named, options=whole)
    return model, optimizer, schedule


def train(library, resume, steps):
    saved = torch.load(resume)
    model, optimizer, schedule = {"zero": zero, "fsdp": fsdp}[library](saved)
    schedule.load_state_dict(saved["schedule"])
    for step in range(saved["step"], saved["step"] + steps):
        losses = []
        for micro, inputs in enumerate(batches_of(step, dist.get_rank(), dist.get_world_size())):
            last = micro == ACCUMULATE - 1
            if library == "zero":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            loss = model(**inputs).loss
            (loss / ACCUMULATE).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        norm = norm.full_tensor() if library == "fsdp" else norm
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {mean.item() / dist.get_world_size():.7f}  norm {norm.item():.7f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["zero", "fsdp"])
    parser.add_argument("--resume", default="job.pt")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(given.library, given.resume, given.steps)
    dist.barrier()
