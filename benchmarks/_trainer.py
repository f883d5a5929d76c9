"""Trainings by the transformers library's own Trainer and by shardkit's, block after block in the same ranks."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardkit.testing import preload, run

preload("transformers", "accelerate", "deepspeed")

WARM = 4
"""Steps of a block that aren't timed: buckets, first states of the optimizer."""

SIZES = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
"""Buckets of the announcement's file, which are DeepSpeed's own defaults, too."""

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


@dataclass(frozen=True)
class Arm:
    """One of the Trainers: shardkit's or the library's own, with arguments beside those of all."""

    name: str
    ours: bool
    arguments: dict[str, Any]


def measure(
    arms: list[Arm], *, blocks: int, length: int, batch: int, processor: bool = False
) -> dict[str, list[float]]:
    """Return seconds per optimizer step of each arm in each round, on rank 0 of two; of the wall or the processor."""
    return run(_blocks, arms, blocks, length, batch, processor, processes=2, timeout=1800)[0]


def _blocks(arms: list[Arm], blocks: int, length: int, batch: int, processor: bool) -> dict[str, list[float]]:
    import deepspeed

    # Never used here, and compiled at the first start otherwise.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(blocks + 1):
        for arm in arms:
            taken = _train(arm, length, batch, time.process_time if processor else time.perf_counter)
            if turn:
                seconds[arm.name].append(taken)
    return seconds


def _train(arm: Arm, length: int, batch: int, clock: Callable[[], float]) -> float:
    """Train the T5 of the commands for some steps, and return the seconds of one."""
    import torch
    import transformers

    import shardkit.transformers
    from shardkit.workloads import load

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == WARM:
                self.start = clock()
            elif state.global_step == WARM + length:
                self.seconds = (clock() - self.start) / length

    # What the library's own integration leaves behind in the process.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    work = load("t5-tiny")
    rows = [
        {name: value[place] for name, value in many.items()}
        for many, _ in zip(work.batches(8), range(batch), strict=False)
        for place in range(8)
    ]
    module = shardkit.transformers if arm.ours else transformers
    with tempfile.TemporaryDirectory() as folder:
        timed = Clock()
        trainer = module.Trainer(
            model=work.model,
            args=module.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=WARM + length,
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
                report_to=[],
                use_cpu=True,
                dataloader_pin_memory=False,
                **arm.arguments,
            ),
            train_dataset=rows,
            callbacks=[timed],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        torch.distributed.barrier()
        trainer.train()
        if arm.ours and trainer.session is not None:
            trainer.session.close()
    return timed.seconds


def deepspeed_file(*, sizes: bool) -> str:
    """Return the same file for both: ZeRO stage 2, with sizes of buckets or not, the rest as the arguments say."""
    return json.dumps({"zero_optimization": {"stage": 2, **(SIZES if sizes else {})}, **CONFIG})
