"""The job as it is: FairScale, by hand."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim import OSS
from task import ACCUMULATE, batches_of, build, groups, warmup
from torch.optim.lr_scheduler import LambdaLR


def train(steps, resume=None, save=None, through="model"):
    model = build()
    optimizer = OSS(groups(model), optim=torch.optim.AdamW, lr=1e-3)
    schedule = LambdaLR(optimizer, warmup)
    first = 0
    if resume:
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    sharded = ShardedDDP(model, optimizer)

    for step in range(first, first + steps):
        losses = []
        for micro, inputs in enumerate(batches_of(step, dist.get_rank(), dist.get_world_size())):
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else sharded.no_sync():
                loss = sharded(**inputs).loss
                (loss / ACCUMULATE).backward()
            losses.append(loss.detach())
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        (sharded if through == "model" else optimizer).zero_grad()
        schedule.step()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {mean.item() / dist.get_world_size():.7f}  norm {norm.item():.7f}")

    if save:
        optimizer.consolidate_state_dict(recipient_rank=0)
        if dist.get_rank() == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": first + steps}, save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--zero-grad", choices=["model", "optimizer"], default="model")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(given.steps, given.resume, given.save, given.zero_grad)
    dist.barrier()
