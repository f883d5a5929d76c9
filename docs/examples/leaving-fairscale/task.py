"""What is trained: a small GPT-2 that goes on with English text, letter by letter. Nothing of it changes."""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = torch.frombuffer(
    bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8
).long()
LENGTH = 64
ACCUMULATE = 2


def build(width=128, layers=4):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": width, "n_layer": layers, "n_head": 4}
    plain = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **plain))


def groups(model):
    matrices = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def warmup(step):
    return min(1.0, (step + 1) / 10)


def batch(number, size=4):
    places = torch.randint(len(TEXT) - LENGTH, (size, 1), generator=torch.Generator().manual_seed(number))
    words = TEXT[places + torch.arange(LENGTH)]
    return {"input_ids": words, "labels": words}


def batches_of(step, rank, ranks):
    """Return the micro-batches of one rank in one step."""
    return [batch((step * ACCUMULATE + micro) * ranks + rank) for micro in range(ACCUMULATE)]


def loss(model, inputs):
    return model(**inputs).loss


def batches(size):
    number = 0
    while True:
        yield batch(number, size)
        number += 1


def workload(*, width: int = 128, layers: int = 4):
    """For shardkit's commands; the old job doesn't call it."""
    import shardkit

    model = build(width, layers)
    return shardkit.Workload(model, torch.optim.AdamW(groups(model), lr=1e-3), loss, batches)
