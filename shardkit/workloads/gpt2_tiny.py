"""A small GPT-2 with tied weights that predicts the next byte of English text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from shardkit.workloads import Workload
from shardkit.workloads._gpt2 import freeze
from shardkit.workloads._settings import between
from shardkit.workloads._text import passages

LENGTH = 64


def workload(*, frozen_embeddings: bool = False, dropout: float = 0.0) -> Workload:
    """Return a GPT-2 of two layers whose output matrix is its embedding, with SGD that has momentum."""
    between(0, 1, dropout=dropout)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=96,
            n_layer=2,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    if frozen_embeddings:
        freeze(model)
    trained = [value for value in model.parameters() if value.requires_grad]
    return Workload(model, torch.optim.SGD(trained, lr=0.1, momentum=0.9), loss, batches, tokens=Tensor.numel)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of each byte after the first."""
    value: Tensor = model(input_ids=batch, labels=batch).loss
    return value


def batches(size: int) -> Iterator[Tensor]:
    """Yield passages of the text."""
    return passages(size, LENGTH, torch.Generator().manual_seed(1))
