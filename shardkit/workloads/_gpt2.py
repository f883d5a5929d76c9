"""GPT-2 in its published sizes, with random weights, that predicts the next word of English text.

The sizes are those of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), as released.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from shardkit.workloads import Workload
from shardkit.workloads._settings import between
from shardkit.workloads._text import passages, words


class Size(NamedTuple):
    """The width, the number of layers, and the heads of each."""

    n_embd: int
    n_layer: int
    n_head: int


SIZES = {
    "gpt2": Size(768, 12, 12),
    "gpt2-medium": Size(1024, 24, 16),
    "gpt2-large": Size(1280, 36, 20),
    "gpt2-xl": Size(1600, 48, 25),
}

VOCABULARY = 50257
POSITIONS = 1024


def workload(
    size: str,
    /,
    *,
    length: int = POSITIONS,
    label_smoothing: float = 0.0,
    frozen_embeddings: bool = False,
    dropout: float = 0.1,
    lr: float = 1e-4,
) -> Workload:
    """Return a GPT-2 of a published size that reads passages of ``length`` tokens, with AdamW."""
    between(2, POSITIONS, length=length)
    between(0, 1, label_smoothing=label_smoothing, dropout=dropout)
    torch.manual_seed(0)
    shape = SIZES[size]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=shape.n_embd,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
    if frozen_embeddings:
        freeze(model)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=lr)
    mean = partial(loss, label_smoothing=label_smoothing)
    return Workload(model, optimizer, mean, partial(batches, length=length), tokens=Tensor.numel)


def freeze(model: GPT2LMHeadModel) -> None:
    """Train neither the embeddings of words, which are the output's matrix too, nor those of positions."""
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)


def loss(model: nn.Module, batch: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of each token after the first, in float32."""
    # Without the cache of keys and values, which is for generation.
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch[:, 1:].flatten(), label_smoothing=label_smoothing
    )


def batches(size: int, *, length: int = POSITIONS) -> Iterator[Tensor]:
    """Yield passages of the text."""
    return passages(size, length, torch.Generator().manual_seed(1), words())
