"""What is the same on every rank where the library's own may part, and what is warned of."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

import shardkit.transformers
from shardkit import testing
from shardkit.errors import StrategyError
from shardkit.transformers import TrainingArguments
from shardkit.transformers._loss import ignores_the_count
from tests.transformers import tiny


def drawn(folder: str) -> list[list[int]]:
    trainer = tiny.trainer(
        shardkit.transformers, folder, strategy="ddp", train_sampling_strategy="group_by_length", max_steps=1
    )
    loader = trainer.get_train_dataloader()
    marks = {tuple(row["input_ids"].tolist()): at for at, row in enumerate(trainer.train_dataset)}
    passes = []
    for _ in range(2):
        # As dropout does on samples of other lengths.
        torch.rand(1 + int(os.environ["RANK"]))
        passes.append([marks[tuple(row)] for batch in loader for row in batch["input_ids"].tolist()])
    return passes


def test_samples_that_are_grouped_by_length_are_each_drawn_once_though_random_numbers_part(tmp_path: Path) -> None:
    for one, other in zip(*testing.run(drawn, str(tmp_path)), strict=True):
        # Two begin anew, so that each rank's batches are full.
        assert len(one + other) == 24
        assert set(one + other) == set(range(22))


def test_models_that_dont_divide_their_loss_by_the_count_are_told_from_those_that_do() -> None:
    tiny_bert = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    assert ignores_the_count(tiny.t5())
    assert ignores_the_count(BertForSequenceClassification(tiny_bert))
    assert not ignores_the_count(tiny.gpt2())
    assert not ignores_the_count(torch.nn.Linear(1, 1))


def warned(folder: str, model: str, arguments: dict[str, Any], loss_func: Any = None) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit.transformers._loss").addHandler(handler)
    trainer = tiny.trainer(shardkit.transformers, folder, model, strategy="ddp", max_steps=1, **arguments)
    trainer.compute_loss_func = loss_func
    trainer._look_at_loss()
    return told


def test_a_loss_that_grows_with_accumulation_is_warned_of_once(tmp_path: Path) -> None:
    (told,) = warned(str(tmp_path), "t5", {})
    assert "T5ForConditionalGeneration takes num_items_in_batch" in told
    assert "are 2 times those of the mean" in told
    assert warned(str(tmp_path), "t5", {"gradient_accumulation_steps": 1}) == []
    assert warned(str(tmp_path), "t5", {}, lambda *arguments: None) == []
    assert warned(str(tmp_path), "gpt2", {}) == []


def test_a_flag_trains_on_cpu_where_nothing_else_is_there_so_that_launched_processes_know_each_other() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is another device")
    assert TrainingArguments("out", strategy="ddp").use_cpu
    assert not TrainingArguments("out", sharded_ddp=False).use_cpu


def test_processes_that_the_library_takes_for_one_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("out", use_cpu=True, strategy="ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StrategyError, match=r"2 processes were launched, .* one alone, on cpu: give --use_cpu"):
        args.to_strategy()


def test_a_callback_that_would_see_clipped_gradients_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Scaling(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None: ...

    trainer = tiny.trainer(shardkit.transformers, str(tmp_path), strategy="ddp")
    caplog.clear()
    trainer._look_at_callbacks()
    assert not caplog.messages
    trainer.add_callback(Scaling())
    trainer._look_at_callbacks()
    (told,) = caplog.messages
    assert told.startswith("Scaling sees gradients before they are clipped")
    trainer.args.max_grad_norm = 0
    trainer._look_at_callbacks()
    assert len(caplog.messages) == 1
