"""Two tiny models with data of uneven lengths, and a training of either by any module's Trainer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

with warnings.catch_warnings():
    # Accelerate imports DeepSpeed where it is installed, which warns.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    import shardkit.transformers

WORDS = 40


def t5(dropout: float = 0.0) -> T5ForConditionalGeneration:
    """Return a T5 of one layer on each side, always with the same weights."""
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_heads=2,
            num_layers=1,
            num_decoder_layers=1,
            dropout_rate=dropout,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """Return a GPT-2 of two layers, always with the same weights."""
    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, **rates)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 1
    return GPT2LMHeadModel(config)


MODELS = {"t5": t5, "gpt2": gpt2}


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return samples of 8 tokens, of which 3 to 8 have a label, so that means of means are wrong."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(2, WORDS, (8,), generator=generator)
        length = int(torch.randint(3, 9, (), generator=generator))
        labels = torch.randint(2, WORDS, (8,), generator=generator)
        labels[length:] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


@dataclass
class Training:
    """What a training showed."""

    losses: list[float]
    """Of each step, over all ranks and the whole window."""
    norms: list[float]
    """Of each step's gradient before clipping."""
    rates: list[float]
    """Learning rates of each step."""
    metrics: dict[str, float]
    """Of the evaluation at the end."""
    weights: dict[str, torch.Tensor] = field(repr=False)
    log: list[dict[str, Any]] = field(repr=False)
    """The Trainer's ``log_history``."""


def trainer(module: Any, folder: str, model: str = "t5", **arguments: Any) -> Any:
    """Return ``module``'s Seq2SeqTrainer over a tiny model: accumulation, clipping, two groups, a schedule.

    ``module`` is ``transformers`` or ``shardkit.transformers``. On 2 ranks 22 samples make 3 windows of 2 x 2
    samples in each of 2 epochs, the last one shorter.
    """
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "num_train_epochs": 2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    made = module.Seq2SeqTrainer(
        model=MODELS[model](),
        args=module.Seq2SeqTrainingArguments(**{**settings, **arguments}),
        train_dataset=samples(22),
        eval_dataset=samples(7, seed=1),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def train(module: Any, folder: str, model: str = "t5", resume: str | None = None, **arguments: Any) -> Training:
    """Train, evaluate, and return what was seen. Collective."""
    return trained(trainer(module, folder, model, **arguments), resume)


def trained(made: Any, resume: str | None = None) -> Training:
    """Train a Trainer, evaluate, and return what was seen. Collective."""
    made.train(resume_from_checkpoint=resume)
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    metrics = made.evaluate()
    session = getattr(made, "session", None)
    weights = made.model.state_dict() if session is None else session.full_weights()
    return Training(
        [entry["loss"] for entry in steps],
        [entry["grad_norm"] for entry in steps],
        [entry["learning_rate"] for entry in steps],
        metrics,
        {name: value.detach().clone() for name, value in weights.items()},
        made.state.log_history,
    )


def own(folder: str, model: str = "t5", **arguments: Any) -> Training:
    """Train by the library's own Trainer under plain DDP: the reference."""
    return train(transformers, folder, model, **arguments)


def sharded(folder: str, model: str = "t5", **arguments: Any) -> Training:
    """Train by shardkit's Trainer under the flag among the arguments."""
    return train(shardkit.transformers, folder, model, **arguments)
