"""What the programs of the documentation take as given, by name: ``<!-- setup: NAME -->``.

A setup is a generator: it yields the names, and goes on when the program has ended, to check what came of it. It runs
on every rank. How many there are stands in ``RANKS``, 2 unless said; on 0 it runs in the test's own process.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import shardkit

Names = dict[str, Any]
RANKS = {"nothing": 1, "saved": 1, "alone": 0, "function": 0}

WORDS = 16


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Model(nn.Module):
    """Predicts a word's label from the word alone; called, and generates, as models of the transformers library do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        logits = self.head(self.embed(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)

    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            input_ids = torch.cat([input_ids, self(input_ids).logits[:, -1:].argmax(-1)], dim=1)
        return input_ids


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def batches_of(rank: int, count: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    words = torch.randint(WORDS, (count, 2, 2, 4), generator=generator)
    return [{"input_ids": inputs, "attention_mask": torch.ones(2, 4), "labels": labels} for inputs, labels in words]


def made() -> Names:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"shardkit": shardkit, "torch": torch, "model": model, "optimizer": optimizer}


def nothing() -> Iterator[Names]:
    yield {"shardkit": shardkit, "torch": torch}


def alone() -> Iterator[Names]:
    yield from nothing()


def objects() -> Iterator[Names]:
    """A model, its optimizer, and what else a loop needs, not prepared."""
    names = made()
    names |= {"strategy": "ddp", "schedule": LambdaLR(names["optimizer"], warmup), "loader": batches_of(rank())}
    yield names
    assert isinstance(names["session"], shardkit.Session)
    names["session"].close()


def whole_batch() -> Iterator[Names]:
    """Two steps of 4 micro-batches a rank, which are to be those of one process on all of them."""
    names = made() | {"warmup": warmup, "loader": batches_of(rank())}
    reference = copy.deepcopy(names["model"])
    yield names
    ranks = int(os.environ["WORLD_SIZE"])
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, warmup)
    for first in (0, 4):
        window = [batch for each in range(ranks) for batch in batches_of(each)[first : first + 4]]
        torch.stack([reference(**batch).loss for batch in window]).mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.testing.assert_close(dict(names["model"].state_dict()), dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
    assert shardkit.checkpoints.inspect(shardkit.checkpoints.latest("checkpoints")).step == 2


def trainer() -> Iterator[Names]:
    """A tiny model and samples for a Trainer, which trains it."""
    from tests.transformers import tiny

    names = {"shardkit": shardkit, "torch": torch, "model": tiny.t5(), "samples": tiny.samples(8)}
    yield names
    if "trainer" in names:
        assert names["trainer"].state.global_step > 0
        names["trainer"].session.close()


def session() -> Iterator[Names]:
    """A session within training, its parameters sharded."""
    names = made()
    session = shardkit.prepare(names["model"], names["optimizer"], "deepspeed:stage=3")
    names |= {"session": session, "schedule": LambdaLR(session.optimizer, warmup), "best": 0.5}
    names["loader"] = batches_of(rank())
    names["prompt"] = {"input_ids": torch.tensor([[1, 2, 3][: 2 + rank()]])}
    for batch in batches_of(rank(), 2):
        session.backward(session.model(**batch).loss)
        session.step()
    yield names
    session.close()


def function() -> Iterator[Names]:
    def train() -> int:
        import os

        return int(os.environ["RANK"])

    names = {"shardkit": shardkit, "train": train}
    yield names
    assert names["results"] == [0, 1]


def sampled() -> Iterator[Names]:
    """A loader whose passes end in a short window."""
    names = made()
    samples = [{name: rows[0] for name, rows in batch.items()} for batch in batches_of(0, 10)]
    sampler: DistributedSampler[Any] = DistributedSampler(samples, int(os.environ["WORLD_SIZE"]), rank())  # type: ignore[arg-type]
    session = shardkit.prepare(names["model"], names["optimizer"], "fairscale:accumulate=2")
    names |= {"session": session, "schedule": LambdaLR(session.optimizer, warmup), "epochs": 2}
    names |= {"sampler": sampler, "loader": DataLoader(samples, batch_size=2, sampler=sampler)}  # type: ignore[arg-type]
    yield names
    # A rank has 5 samples: batches of 2, 2 and 1, in windows of 2 and 1.
    assert (session.steps, names["schedule"].last_epoch, names["windows"].epoch) == (4, 4, 2)
    session.close()


def tokens() -> Iterator[Names]:
    """Micro-batches whose tokens differ in number, and ranks with different numbers of them: one whole step."""

    def padded(rank: int) -> list[dict[str, Tensor]]:
        found = batches_of(rank, 3 - rank)
        for number, batch in enumerate(found):
            batch["labels"][:, number + 1 :] = -100
        return found

    names = made()
    reference = copy.deepcopy(names["model"])
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    session = shardkit.prepare(names["model"], optimizer, "ddp:accumulate=3")
    names |= {"session": session, "loader": padded(rank()), "cross_entropy": nn.functional.cross_entropy}
    yield names
    every = [batch for each in range(session.world_size) for batch in padded(each)]
    labels = torch.cat([batch["labels"].flatten() for batch in every])
    logits = torch.cat([reference(batch["input_ids"]).logits.flatten(0, 1) for batch in every])
    nn.functional.cross_entropy(logits, labels).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(names["model"].state_dict()), dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
    session.close()


def restarted() -> Iterator[Names]:
    """A program that is started once more, from what the first run saved."""
    names = made()
    session = shardkit.prepare(names["model"], names["optimizer"], "ddp")
    schedule = LambdaLR(session.optimizer, warmup)
    names |= {"session": session, "schedule": schedule, "objects": {"schedule": schedule}}
    names |= {"signal": signal, "batches": iter(batches_of(rank())), "steps": 4}
    yield names
    assert (session.steps, schedule.last_epoch) == (4, 4)
    session.close()


def imported() -> Iterator[Names]:
    """A checkpoint of plain torch, three steps old, with its schedule, that became one of shardkit's."""
    names = made()
    schedule = LambdaLR(names["optimizer"], warmup)
    for batch in batches_of(0, 3):
        names["model"](**batch).loss.backward()
        names["optimizer"].step()
        schedule.step()
    if rank() == 0:
        parts = {"model": names["model"], "optimizer": names["optimizer"], "lr_scheduler": schedule}
        torch.save({name: part.state_dict() for name, part in parts.items()}, "run.pt")
        shardkit.checkpoints.import_checkpoint("run.pt", "checkpoints", names="order", optimizer_class="AdamW")
    names = made()
    session = shardkit.prepare(names["model"], names["optimizer"], "deepspeed:stage=2")
    names |= {"session": session, "schedule": LambdaLR(session.optimizer, warmup)}
    yield names
    assert names["schedule"].last_epoch == 3
    session.close()


def saved() -> Iterator[Names]:
    """A directory with a checkpoint, after a hundred steps."""
    names = made()
    with shardkit.prepare(names["model"], names["optimizer"], "ddp") as session:
        batch = batches_of(0)[0]
        for _ in range(100):
            session.backward(session.model(**batch).loss)
            session.step()
        session.save("checkpoints")
    yield names
    assert names["found"].step == 100
    assert names["found"].damage is None


def language_model() -> Iterator[Names]:
    """A session of a model of the transformers library."""
    import safetensors.torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    )
    session = shardkit.prepare(model, torch.optim.AdamW(model.parameters()), "deepspeed:stage=3")
    weights = session.full_weights()
    names = {"session": session, "AutoModelForCausalLM": AutoModelForCausalLM, "safetensors": safetensors}
    yield names
    torch.testing.assert_close(dict(names["model"].state_dict()), weights, rtol=0, atol=0)
    session.close()
