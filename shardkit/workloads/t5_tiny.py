"""A small T5 that fills gaps in English text, byte by byte: span corruption as T5 was trained with.

The objective is that of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020), section 3.1.4: 15 % of the input falls to gaps of 3 bytes on average. Every sample has the same
number of gaps and of hidden bytes, so that the mean over the batch is the mean of its parts' means.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

from shardkit.workloads import Workload
from shardkit.workloads._settings import between
from shardkit.workloads._t5 import beam_search, mean_over_tokens
from shardkit.workloads._text import passages

LENGTH = 64
HIDDEN = 10
GAPS = 3

PAD, END = 0, 1
FIRST_BYTE = 2
FIRST_GAP = FIRST_BYTE + 256
VOCABULARY = FIRST_GAP + GAPS


def workload(*, label_smoothing: float = 0.0, frozen_embeddings: bool = False, dropout: float = 0.0) -> Workload:
    """Return a T5 of two layers on each side, with AdamW that decays the matrices only."""
    between(0, 1, label_smoothing=label_smoothing, dropout=dropout)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_heads=4,
            num_layers=2,
            num_decoder_layers=2,
            dropout_rate=dropout,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
    )
    if frozen_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    matrices = [value for value in model.parameters() if value.requires_grad and value.dim() > 1]
    scales = [value for value in model.parameters() if value.requires_grad and value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)
    mean = partial(smoothed, label_smoothing=label_smoothing) if label_smoothing else loss
    return Workload(model, optimizer, mean, batches, generate, tokens)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the hidden bytes, of the marks between them and of the end."""
    value: Tensor = model(**batch).loss
    return value


def smoothed(model: nn.Module, batch: dict[str, Tensor], *, label_smoothing: float) -> Tensor:
    """Return the same with smoothed labels."""
    return mean_over_tokens(model(**batch).logits, batch["labels"], label_smoothing)


def generate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return what a beam search fills the gaps with, as many tokens as are hidden."""
    return beam_search(model, batch["input_ids"], batch["labels"].shape[1])


def tokens(batch: dict[str, Tensor]) -> int:
    """Return the tokens of both sides."""
    return batch["input_ids"].numel() + batch["labels"].numel()


def batches(size: int) -> Iterator[dict[str, Any]]:
    """Yield passages with gaps in them, and what belongs in the gaps."""
    generator = torch.Generator().manual_seed(1)
    for texts in passages(size, LENGTH, generator):
        pairs = [corrupt(text + FIRST_BYTE, generator) for text in texts]
        yield {
            "input_ids": torch.stack([seen for seen, _ in pairs]),
            "labels": torch.stack([hidden for _, hidden in pairs]),
        }


def corrupt(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a text whose gaps are each one mark, and the marks each followed by what its gap hides."""
    seen: list[Tensor] = []
    hidden: list[Tensor] = []
    kept = _parts(len(text) - HIDDEN, GAPS, generator)
    lost = _parts(HIDDEN, GAPS, generator)
    start = 0
    for gap, (keep, lose) in enumerate(zip(kept, lost, strict=True)):
        mark = torch.tensor([FIRST_GAP + gap])
        seen += [text[start : start + keep], mark]
        hidden += [mark, text[start + keep : start + keep + lose]]
        start += keep + lose
    end = torch.tensor([END])
    return torch.cat([*seen, end]), torch.cat([*hidden, end])


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Cut a length into so many parts of at least one, every way being equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return [right - left for left, right in pairwise(edges)]
