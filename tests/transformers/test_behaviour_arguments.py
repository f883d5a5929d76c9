"""The arguments, one process, and no flag at all."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit import testing
from shardkit.transformers import Seq2SeqTrainingArguments, TrainingArguments
from tests.transformers import behaviours, tiny
from tests.transformers.conftest import unlike
from tests.transformers.tiny import transformers

PLAIN = ["--output_dir", "out", "--use_cpu", "--report_to", "none"]


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
@pytest.mark.parametrize(
    ("line", "options"),
    [
        ([], []),
        (["--sharded_ddp"], ["simple"]),
        (["--sharded_ddp", "simple"], ["simple"]),
        (["--sharded_ddp", "--max_steps", "3"], ["simple"]),
    ],
)
def test_the_librarys_parser_takes_the_flag_bare_with_a_value_and_not_at_all(
    kind: type, line: list[str], options: list[str]
) -> None:
    (args,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses([*PLAIN, *line])
    assert args.sharded_ddp == options
    assert (args.to_strategy() is None) == (not options)


def test_the_librarys_parser_reads_the_flags_from_a_mapping() -> None:
    values = {"output_dir": "out", "use_cpu": True, "report_to": [], "strategy": "fsdp"}
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_dict(values)
    assert args.to_strategy().backend == "fsdp"


@pytest.mark.parametrize("flags", [{}, {"sharded_ddp": "simple"}, {"strategy": "deepspeed:stage=3"}])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args)), dataclasses.replace])
def test_arguments_can_be_copied(flags: dict[str, Any], copied: Any) -> None:
    args = TrainingArguments("out", use_cpu=True, report_to=[], max_grad_norm=0.5, bf16=True, **flags)
    other = copied(args)
    assert other.to_strategy() == args.to_strategy()
    assert other.to_dict() == args.to_dict()


def _bits(folder: str, flags: dict[str, Any] | None) -> dict[str, Any]:
    side = behaviours.Side(folder, flags)
    trainer = side.trainer(kind="Seq2SeqTrainer", predict_with_generate=True, generation_max_length=9, bf16=True)
    before = behaviours.timeless(trainer.predict(tiny.samples(5)).metrics)
    trainer = side.trainer(kind="Seq2SeqTrainer", num_train_epochs=2, save_strategy="epoch")
    trainer.train()
    return {
        **behaviours.steps(trainer),
        "before": before,
        "eval": behaviours.timeless(trainer.evaluate()),
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
        "wrapped": type(trainer.model_wrapped).__name__,
        "accelerator": type(trainer.accelerator).__module__,
        "files": sorted(path.name for path in Path(folder, "checkpoint-3").iterdir()),
    }


def test_without_a_flag_all_is_the_librarys_own_to_the_last_bit(tmp_path: Path) -> None:
    own = testing.run(_bits, str(tmp_path / "own"), None)
    assert testing.run(_bits, str(tmp_path / "none"), {}) == own
    assert own[0]["wrapped"] == "DistributedDataParallel"


@pytest.mark.parametrize("backend", ["ddp", "deepspeed:stage=3"])
def test_one_process_trains_alone_and_finds_a_batch_that_fits(tmp_path: Path, backend: str) -> None:
    own, seen = (testing.run(_found, str(tmp_path), flags, processes=1)[0] for flags in (None, {"strategy": backend}))
    assert seen["tried"][0] == 8
    assert seen["tried"][-1] <= 3
    assert unlike(own, seen) == []


class Small(behaviours.Line):
    """Is a line with no memory for more than 3 samples."""

    def forward(self, values: torch.Tensor, labels: Any = None, others: Any = None) -> Any:
        if len(values) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(values, labels)


def _found(folder: str, flags: dict[str, Any] | None) -> dict[str, Any]:
    class Tried(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            tried.append(state.train_batch_size)

    tried: list[int] = []
    side = behaviours.Side(folder, flags)
    given = {"callbacks": [Tried()]}
    trainer = behaviours.line(side, Small(), auto_find_batch_size=True, per_device_train_batch_size=8, given=given)
    trainer.train()
    return {**behaviours.steps(trainer), "tried": tried}


def _kept(folder: str, flags: dict[str, Any]) -> dict[str, Any]:
    def model() -> behaviours.Line:
        models.append(weakref.ref(made := behaviours.Line()))
        return made

    models: list[weakref.ref[torch.nn.Module]] = []
    trainer = behaviours.line(behaviours.Side(folder, flags), given={"model_init": model})
    trainer.train()
    trainer.train()
    gc.collect()
    alive = [held() is not None for held in models]
    trainer.train()
    copied = copy.deepcopy(trainer.model) if "ddp" in str(flags) else None
    trainer.end()
    del trainer
    gc.collect()
    return {"alive": alive, "after": [held() is not None for held in models], "copied": type(copied).__name__}


@pytest.mark.parametrize("backend", ["ddp", "fairscale", "fsdp"])
def test_models_of_earlier_trainings_are_let_go(tmp_path: Path, backend: str) -> None:
    for seen in testing.run(_kept, str(tmp_path), {"strategy": backend}):
        # The first was made by the Trainer itself.
        assert seen["alive"] == [False, False, True]
        assert not any(seen["after"])
