"""Four models of a few hundred or thousand parameters, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, its loss and its data.

    ``build(seed)`` returns the module with weights of that seed. ``loss(module, batch)`` is the mean over the batch's
    samples, scaled so that the norm of every gradient is well above 1, which is what some libraries clip to unless told
    otherwise. ``draw(generator, samples)`` makes a batch. ``whole_batch`` says that the loss of the global
    batch is the mean of the losses of its parts, which BatchNorm breaks: it normalizes each micro-batch by itself.
    """

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[torch.Generator, int], Batch]
    samples: int
    world_sizes: tuple[int, ...]
    whole_batch: bool = True

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: the same for every world size and accumulation."""
        return self.draw(torch.Generator().manual_seed(1000 + step), self.samples)

    def part(self, step: int, rank: int, world_size: int, micro: int, accumulate: int) -> Batch:
        """Return the micro-batch of one rank: one of ``world_size * accumulate`` equal parts of the global batch."""
        size, rest = divmod(self.samples, world_size * accumulate)
        assert rest == 0, f"{self.samples} samples don't split evenly over {world_size} ranks x {accumulate}"
        start = (micro * world_size + rank) * size
        return {name: value[start : start + size] for name, value in self.batch(step).items()}


def _mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # Odd sizes, so that no shard of any tensor or group comes out even.
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 13), nn.SiLU(), nn.Linear(13, 5))


def _mlp_batch(generator: torch.Generator, samples: int) -> Batch:
    return {
        "inputs": torch.randn(samples, 7, generator=generator),
        "targets": 3 * torch.randn(samples, 5, generator=generator),
    }


def _squared_error(module: nn.Module, batch: Batch) -> Tensor:
    return 4 * functional.mse_loss(module(batch["inputs"]), batch["targets"])


def _convnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # No bias before BatchNorm: its gradient is zero but for round-off. Smooth activations: no kink to fall on.
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Conv2d(6, 9, 3, stride=2, bias=False),
        nn.BatchNorm2d(9),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def _convnet_batch(generator: torch.Generator, samples: int) -> Batch:
    return {
        "inputs": torch.randn(samples, 3, 6, 6, generator=generator),
        "targets": torch.randint(5, (samples,), generator=generator),
    }


def _classification(module: nn.Module, batch: Batch) -> Tensor:
    return 2 * functional.cross_entropy(module(batch["inputs"]), batch["targets"])


def _t5_tiny(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=61,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
        )
    )


def _t5_batch(generator: torch.Generator, samples: int) -> Batch:
    return {
        "input_ids": torch.randint(1, 61, (samples, 9), generator=generator),
        "labels": torch.randint(1, 61, (samples, 6), generator=generator),
    }


def _span_corruption(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(input_ids=batch["input_ids"], labels=batch["labels"]).logits
    # Not the model's own loss, which is of float32 also in a float64 model.
    return 3 * functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _gpt2_tiny(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def _gpt2_batch(generator: torch.Generator, samples: int) -> Batch:
    return {"input_ids": torch.randint(61, (samples, 8), generator=generator)}


def _next_token(module: nn.Module, batch: Batch) -> Tensor:
    logits: Any = module(input_ids=batch["input_ids"]).logits[:, :-1]
    return 3 * functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


MODELS = {
    model.name: model
    for model in (
        Model("mlp", _mlp, _squared_error, _mlp_batch, 24, (1, 2, 4)),
        Model("convnet", _convnet, _classification, _convnet_batch, 24, (1, 2, 4), whole_batch=False),
        Model("t5_tiny", _t5_tiny, _span_corruption, _t5_batch, 12, (1, 2)),
        Model("gpt2_tiny", _gpt2_tiny, _next_token, _gpt2_batch, 12, (1, 2)),
    )
}
