"""What the benchmarks train: a linear layer, to see overhead, and T5 from its configuration, to see size and speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

import shardkit.workloads
from shardkit import Workload

SOURCE, TARGET = 128, 64
"""Tokens that T5 reads and writes per sample."""

SHORT = 8
"""The same of short samples, of which many fit, so that an answer is exact to a few per cent."""

VOCABULARY = 384


def linear() -> Workload:
    """Return the smallest model that trains: what a step costs is then what surrounds it."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=1e-3), _square, _vectors)


def t5_tiny() -> Workload:
    """Return a T5 of 0.7 million parameters: a step is mostly calls."""
    return _t5(d_model=128, d_ff=256, num_layers=2, num_heads=4, d_kv=32)


def t5_small() -> Workload:
    """Return a T5 of 29,568,512 parameters, 112.8 MiB in float32."""
    return _t5(d_model=512, d_ff=2048, num_layers=4, num_heads=8, d_kv=64)


def t5_short() -> Workload:
    """Return a T5 of 14,789,376 parameters, deep and narrow, on short samples: it takes memory, and computes little."""
    return _t5(d_model=256, d_ff=1024, num_layers=8, num_heads=4, d_kv=64, lengths=(SHORT, SHORT))


def t5_built_in() -> Workload:
    """Return the T5 that the commands train unless told otherwise, of 0.8 million parameters."""
    made = shardkit.workloads.load("t5-tiny")
    made.model.train()
    return made


WORKLOADS = {
    "linear": linear,
    "t5-tiny": t5_tiny,
    "t5-small": t5_small,
    "t5-short": t5_short,
    "built-in t5-tiny": t5_built_in,
}


def _t5(*, lengths: tuple[int, int] = (SOURCE, TARGET), **sizes: int) -> Workload:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=0.1, **sizes)
    model = T5ForConditionalGeneration(config)
    model.train()
    # Fused: the update makes no temporary copies, so the peak shows what the backend holds.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, _language_loss, partial(_tokens, lengths))


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _vectors(size: int) -> Iterator[Tensor]:
    return repeat(torch.randn(size, 16, generator=torch.Generator().manual_seed(0)))


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _tokens(lengths: tuple[int, int], size: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(3, VOCABULARY, (size, length), generator=generator) for length in lengths)
    return repeat({"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target})
