"""T5 in its published sizes, with random weights, that goes on from a passage of English text: what follows it.

The sizes are those of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020), as released: ReLU, one embedding for both sides and the output. The task has the shape of what
fine-tuning T5 to translate is measured with, 128 tokens in and 128 out; the tokens are words of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

from shardkit.workloads import Workload
from shardkit.workloads._settings import between
from shardkit.workloads._text import passages, words


class Size(NamedTuple):
    """``layers`` is of the encoder, and as many of the decoder."""

    d_model: int
    d_ff: int
    d_kv: int
    heads: int
    layers: int


SIZES = {
    "t5-small": Size(512, 2048, 64, 8, 6),
    "t5-base": Size(768, 3072, 64, 12, 12),
    "t5-large": Size(1024, 4096, 64, 16, 24),
    "t5-3b": Size(1024, 16384, 128, 32, 24),
    "t5-11b": Size(1024, 65536, 128, 128, 24),
}

VOCABULARY = 32128
PAD, END = 0, 1
FIRST_WORD = 2

BEAMS = 4


def workload(
    size: str,
    /,
    *,
    source: int = 128,
    target: int = 128,
    label_smoothing: float = 0.0,
    frozen_embeddings: bool = False,
    dropout: float = 0.1,
    lr: float = 1e-4,
) -> Workload:
    """Return a T5 of a published size that reads ``source`` tokens and writes ``target``, with AdamW."""
    between(1, math.inf, source=source, target=target)
    between(0, 1, label_smoothing=label_smoothing, dropout=dropout)
    torch.manual_seed(0)
    shape = SIZES[size]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            d_kv=shape.d_kv,
            num_heads=shape.heads,
            num_layers=shape.layers,
            num_decoder_layers=shape.layers,
            dropout_rate=dropout,
            feed_forward_proj="relu",
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
    )
    if frozen_embeddings:
        # Of the encoder, of the decoder and of the output: they are one.
        model.get_input_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=lr)
    return Workload(
        model,
        optimizer,
        partial(loss, label_smoothing=label_smoothing),
        partial(batches, source=source, target=target),
        generate,
        tokens,
    )


def loss(model: nn.Module, batch: dict[str, Tensor], *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the target's tokens."""
    # Without the cache of keys and values, which is for generation; labels are left out, or the model would compute
    # the loss too.
    inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    return mean_over_tokens(model(**inputs, use_cache=False).logits, batch["labels"], label_smoothing)


def mean_over_tokens(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Return the mean cross-entropy, in float32; a share of each label is spread over the whole vocabulary."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=label_smoothing)


def generate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return what a beam search of 4 goes on with, as many tokens as the target has."""
    return beam_search(model, batch["input_ids"], batch["labels"].shape[1])


def beam_search(model: nn.Module, source: Tensor, length: int) -> Tensor:
    """Return a beam search's best answers of ``length`` tokens, a row for each of the source."""
    # Of equal lengths: an answer that could end early would have ranks call the model unequally often.
    found: Tensor = model.generate(  # type: ignore[operator]
        input_ids=source, num_beams=BEAMS, do_sample=False, min_new_tokens=length, max_new_tokens=length
    )
    return found[:, 1:]


def tokens(batch: dict[str, Tensor]) -> int:
    """Return the tokens of both sides."""
    return batch["input_ids"].numel() + batch["labels"].numel()


def batches(size: int, *, source: int = 128, target: int = 128) -> Iterator[dict[str, Tensor]]:
    """Yield passages, what follows each, and the same one token later, as the decoder reads it."""
    generator = torch.Generator().manual_seed(1)
    for texts in passages(size, source + target - 2, generator, words() + FIRST_WORD):
        end = torch.full((size, 1), END)
        labels = torch.cat([texts[:, source - 1 :], end], 1)
        yield {
            "input_ids": torch.cat([texts[:, : source - 1], end], 1),
            "decoder_input_ids": torch.cat([torch.full((size, 1), PAD), labels[:, :-1]], 1),
            "labels": labels,
        }
