"""The same job over shardkit: the library is a word of the command line."""

import argparse
import contextlib
import dataclasses
import functools

import torch
from task import ACCUMULATE, batches_of, build, groups, warmup
from torch.optim.lr_scheduler import LambdaLR

import shardkit


def train(strategy, record, steps=10, resume="checkpoints", save=None):
    model = build()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    strategy = dataclasses.replace(strategy, accumulate=ACCUMULATE, max_grad_norm=1.0)
    session = shardkit.prepare(model, optimizer, strategy)
    schedule = LambdaLR(session.optimizer, warmup)
    if resume:
        state = session.load(resume)
        schedule.load_state_dict(state["schedule"])

    with session, record(session):
        for _ in range(steps):
            losses = []
            for inputs in batches_of(session.steps, session.rank, session.world_size):
                loss = session.model(**inputs).loss
                session.backward(loss)
                losses.append(loss.detach())
                if session.step():
                    schedule.step()
            mean = session.gather(torch.stack(losses)).mean()
            if session.rank == 0:
                print(f"step {session.steps:3}  loss {mean:.7f}  norm {session.grad_norm:.7f}")
        if save:
            session.save(save, keep=None, state={"schedule": schedule.state_dict()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--trace")
    given = parser.parse_args()
    record = functools.partial(shardkit.parity.record, path=given.trace) if given.trace else contextlib.nullcontext
    train(shardkit.Strategy.parse(given.strategy), record, given.steps, given.resume, given.save)
