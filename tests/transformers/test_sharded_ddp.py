"""The values of --sharded_ddp: what they mean, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

import shardkit
from shardkit import testing
from shardkit.errors import LaunchError, StrategyError, UnsupportedError
from shardkit.transformers import Seq2SeqTrainingArguments, TrainingArguments, _sharded_ddp
from tests.transformers import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def parsed(*words: str) -> TrainingArguments:
    (found,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", *words], look_for_args_file=False
    )
    return found


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], []),
        (["--sharded_ddp"], ["simple"]),
        (["--sharded_ddp", "--seed", "3"], ["simple"]),
        (["--sharded_ddp", "simple"], ["simple"]),
        (["--sharded_ddp", "True"], ["simple"]),
        (["--sharded_ddp", "false"], []),
        (["--sharded_ddp="], []),
    ],
)
def test_the_command_line_takes_the_flag_bare_and_with_a_value(words: list[str], options: list[str]) -> None:
    args = parsed(*words)
    assert args.sharded_ddp == options
    assert args.to_strategy() == (
        shardkit.Strategy("fairscale", max_grad_norm=1.0, track_grad_norm=True) if options else None
    )


@pytest.mark.parametrize("value", [True, "simple", ["simple"], "simple simple"])
def test_from_python_it_takes_true_a_word_and_a_list(value: Any) -> None:
    args = TrainingArguments("out", use_cpu=True, sharded_ddp=value)
    assert args.sharded_ddp == ["simple"]
    assert TrainingArguments("out", use_cpu=True, sharded_ddp=False).sharded_ddp == []


@pytest.mark.parametrize(
    ("value", "on_cuda", "elsewhere"),
    [
        ("zero_dp_2", "fairscale:shard=parameters", "fsdp:reshard_after_forward=false"),
        ("zero_dp_3", "fairscale:shard=parameters", "fsdp"),
        ("zero_dp_2 offload", None, "fsdp:reshard_after_forward=false,offload=cpu"),
        ("zero_dp_3 offload", None, "fsdp:offload=cpu"),
        ("offload zero_dp_3 auto_wrap", None, "fsdp:offload=cpu,wrap=auto"),
        ("zero_dp_3 auto_wrap", None, "fsdp:wrap=auto"),
    ],
)
def test_parameters_are_split_on_cuda_and_elsewhere_the_error_names_what_does_the_same(
    value: str, on_cuda: str | None, elsewhere: str
) -> None:
    options = _sharded_ddp.parse(value)
    with pytest.raises(UnsupportedError, match=f'needs CUDA.*trains on cpu.*--strategy "{elsewhere}"'):
        _sharded_ddp.strategy_of(options, CPU)
    with pytest.raises(UnsupportedError, match=f'--strategy "{elsewhere}"'):
        TrainingArguments("out", use_cpu=True, sharded_ddp=value)
    args = TrainingArguments("out", use_cpu=True, strategy=elsewhere)
    assert args.to_strategy().backend == "fsdp"
    if on_cuda is None:
        with pytest.raises(UnsupportedError, match=f'isn\'t driven over FairScale.*"{elsewhere}"'):
            _sharded_ddp.strategy_of(options, CUDA)
    else:
        assert _sharded_ddp.strategy_of(options, CUDA) == on_cuda


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("offload", r'add it to zero_dp_2 or zero_dp_3, for example --sharded_ddp "zero_dp_3 offload"'),
        ("auto_wrap", "says nothing of what is split"),
        ("offload auto_wrap", "says nothing of what is split"),
        ("simple offload", "simple goes with no other value"),
        ("simple zero_dp_2", "simple goes with no other value"),
        ("auto_wrap simple", "simple goes with no other value"),
        ("zero_dp_2 zero_dp_3", "zero_dp_2 or zero_dp_3, not both"),
        ("zero_dp_2 zero_dp_3 offload", "zero_dp_2 or zero_dp_3, not both"),
        ("zero_dp_4", "one or several of simple, zero_dp_2, zero_dp_3, offload, auto_wrap, not 'zero_dp_4'"),
        (["simple", 3], "not '3'"),
    ],
)
def test_combinations_that_were_refused_are_refused(value: Any, told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        TrainingArguments("out", use_cpu=True, sharded_ddp=value)


def test_arguments_are_copied_pickled_and_written_with_their_flags(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments("out", use_cpu=True, sharded_ddp=True, gradient_accumulation_steps=3)
    assert json.loads(args.to_json_string())["sharded_ddp"] == ["simple"]
    assert args.to_sanitized_dict()
    for copy in (dataclasses.replace(args), pickle.loads(pickle.dumps(args)), torch_saved(args, tmp_path)):
        assert copy.to_strategy() == args.to_strategy()
        assert copy.to_strategy().accumulate == 3
    assert dataclasses.replace(args, sharded_ddp=False, strategy="ddp").to_strategy().backend == "ddp"


def torch_saved(args: Any, folder: Path) -> Any:
    torch.save(args, folder / "args.bin")
    return torch.load(folder / "args.bin", weights_only=False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"sharded_ddp": True, "deepspeed": "ds.json"}, "--sharded_ddp and --deepspeed can't be used together"),
        ({"sharded_ddp": True, "strategy": "ddp"}, "--sharded_ddp and --strategy can't"),
        ({"deepspeed": {}, "strategy": "ddp", "sharded_ddp": "simple"}, "--sharded_ddp and --strategy can't"),
        ({"strategy": "ddp", "fsdp": "full_shard"}, "--strategy can't be used with:\n  --fsdp: it is another flag"),
        ({"sharded_ddp": True, "bf16_full_eval": True}, "--bf16_full_eval: it casts the weights"),
        ({"strategy": "ddp", "ddp_bucket_cap_mb": 5}, "--ddp_bucket_cap_mb: .*shardkit backends"),
        ({"strategy": "ddp:accumulate=4"}, "accumulate: 4, but --gradient_accumulation_steps mean 1"),
        ({"strategy": "ddp:precision=bf16"}, "precision: 'bf16', but --fp16 and --bf16 mean 'fp32'"),
        ({"strategy": "ddp:max_grad_norm=3"}, "max_grad_norm: 3.0, but --max_grad_norm mean 1.0"),
        ({"strategy": "ddp:"}, "a strategy reads"),
        ({"strategy": "missing.json"}, "there is no strategy file 'missing.json'"),
    ],
)
def test_flags_and_arguments_that_contradict_each_other_are_refused(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        TrainingArguments("out", use_cpu=True, **flags)


def test_what_the_arguments_say_for_every_trainer_goes_into_the_strategy() -> None:
    args = TrainingArguments(
        "out",
        use_cpu=True,
        strategy="fsdp:offload=cpu,on_nonfinite=skip",
        gradient_accumulation_steps=4,
        max_grad_norm=0,
        bf16=True,
    )
    assert args.to_strategy() == shardkit.Strategy(
        "fsdp",
        accumulate=4,
        track_grad_norm=True,
        precision="bf16",
        on_nonfinite="skip",
        options={"offload": "cpu"},
    )


def test_a_strategy_can_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    path.write_text('backend = "zero"\n')
    assert TrainingArguments("out", use_cpu=True, strategy=str(path)).to_strategy().backend == "zero"


def test_an_unknown_backend_is_told_before_the_model_is_touched(tmp_path: Path) -> None:
    with pytest.raises(shardkit.errors.BackendNotFoundError, match="did you mean 'ddp'"):
        tiny.trainer(shardkit.transformers, str(tmp_path), strategy="dpp")


def test_one_process_has_nothing_to_split_by_sharded_ddp(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"splits over several processes, and this is one alone: .*torchrun"):
        tiny.trainer(shardkit.transformers, str(tmp_path), sharded_ddp=True)


def differing(folder: str) -> None:
    import os

    strategy = "ddp" if os.environ["RANK"] == "0" else "zero"
    tiny.trainer(shardkit.transformers, folder, strategy=strategy).train()


def test_ranks_with_different_flags_are_refused_alike(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="MismatchError"):
        testing.run(differing, str(tmp_path))


def lossless(folder: str) -> str:
    trainer = tiny.trainer(shardkit.transformers, folder, sharded_ddp=True)
    trainer.train_dataset = [
        {"input_ids": row["input_ids"], "decoder_input_ids": row["input_ids"]} for row in tiny.samples(8)
    ]
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_whose_output_has_no_loss_is_told_on_every_rank(tmp_path: Path) -> None:
    for told in testing.run(lossless, str(tmp_path)):
        assert "did not return a loss" in told


def unsplit(folder: str, optim: str, strategy: str) -> str:
    try:
        tiny.trainer(shardkit.transformers, folder, optim=optim, strategy=strategy).train()
    except UnsupportedError as error:
        return str(error)
    return ""


def test_an_optimizer_that_the_backend_cannot_split_is_refused_alike(tmp_path: Path) -> None:
    told = testing.run(unsplit, str(tmp_path), "adafactor", "deepspeed:stage=2")
    assert told[0] == told[1]
    assert "Adafactor" in told[0]
    assert "use deepspeed:stage=0 or ddp" in told[0]


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("importlib.util.find_spec = lambda name: None", "transformers, which is not installed"),
        ("importlib.metadata.version = lambda name: '5.9.0'", "needs transformers>=5.22.2, not 5.9.0"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_told_with_what_to_install(missing: str, told: str) -> None:
    script = (
        "import importlib.util, importlib.metadata, shardkit\n"
        f"{missing}\n"
        "try:\n    import shardkit.transformers\n"
        "except shardkit.errors.MissingLibraryError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told in said
    assert 'pip install "shardkit[transformers]"' in said
