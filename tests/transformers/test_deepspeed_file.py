"""A DeepSpeed file is filled from the arguments, or what contradicts them is listed. No ranks."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from shardkit.errors import StrategyError
from shardkit.transformers import TrainingArguments, _deepspeed, _deepspeed_schedule
from tests.transformers import tiny

ANNOUNCED: dict[str, Any] = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "cpu_offload": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "zero_allow_untested_optimizer": True,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
    },
}
"""The file that the documentation of Transformers 4.2.0 shows."""

AGREEING: dict[str, Any] = {"learning_rate": 3e-5, "adam_beta1": 0.8, "weight_decay": 3e-7, "warmup_steps": 500}


def arguments(deepspeed: Any, **given: Any) -> Any:
    settings = {"output_dir": "unused", "use_cpu": True, "report_to": [], "per_device_train_batch_size": 2}
    return TrainingArguments(**{**settings, **given}, deepspeed=deepspeed)


def handed_over(deepspeed: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Return the strategy, and the configuration that the plugin gets."""
    strategy = arguments(deepspeed, **given).to_strategy()
    return strategy, json.loads(strategy.options["config"])


def refusal(deepspeed: Any, **given: Any) -> str:
    with pytest.raises(StrategyError) as refused:
        arguments(deepspeed, **given)
    return str(refused.value)


def test_a_path_a_text_and_a_mapping_mean_the_same(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    strategies = [arguments(given).to_strategy() for given in (str(path), path, json.dumps(config), config)]
    assert strategies == strategies[:1] * 4
    assert json.loads(strategies[0].options["config"])["zero_optimization"] == config["zero_optimization"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"there is no DeepSpeed configuration '.*ds.json', which --deepspeed names"),
        ("{,}", r"'.*ds.json' is not JSON: Expecting property name"),
        ("[1]", r"'.*ds.json' holds a list, not an object"),
        ('{"fp16": {}, "fp16": {}}', r"'.*ds.json' is not JSON: it names the key 'fp16' twice"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StrategyError, match=text):
        arguments(str(path))


def test_a_text_a_mapping_and_another_thing_that_are_none_are_refused(tmp_path: Path) -> None:
    assert refusal('{"a": 1, "a": 2}') == "the DeepSpeed configuration (a text) is not JSON: it names the key 'a' twice"
    assert "(a mapping) is not JSON: Object of type dtype" in refusal({"bf16": torch.bfloat16})
    assert refusal(3) == "--deepspeed takes a path, JSON text or a mapping, not 3"
    assert "can't read the DeepSpeed configuration" in refusal(str(tmp_path))


@pytest.mark.parametrize("given", ["ds.json", '{"zero_optimization": {"stage": 1}}'])
def test_a_command_line_takes_a_path_or_a_text(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    parser = HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", "--deepspeed", given])
    assert args.deepspeed == given
    assert json.loads(args.to_strategy().options["config"])["zero_optimization"] == {"stage": 1}


def test_auto_is_what_the_arguments_say() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    }
    strategy, filled = handed_over(
        config,
        bf16=True,
        gradient_accumulation_steps=3,
        max_grad_norm=0.25,
        learning_rate=1e-3,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        weight_decay=0.1,
    )
    assert (strategy.backend, strategy.accumulate, strategy.max_grad_norm) == ("deepspeed", 3, 0.25)
    assert (strategy.precision, strategy.loss_scale, strategy.loss_scale_window) == ("bf16", 2.0**16, 2000)
    assert filled == {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": config["zero_optimization"],
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.9], "eps": 1e-6, "weight_decay": 0.1},
        },
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_the_file_is_silent_about_is_as_the_arguments_say_as_in_the_first_form(precision: str) -> None:
    given = {} if precision == "fp32" else {precision: True}
    strategy, filled = handed_over({"zero_optimization": {"stage": 2}}, gradient_accumulation_steps=2, **given)
    assert (strategy.accumulate, strategy.max_grad_norm, strategy.precision) == (2, 1.0, precision)
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    assert filled == {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2, **half}
    _, filled = handed_over({"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}}, learning_rate=0.1)
    assert filled["optimizer"] == {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.0}}
    assert handed_over({"optimizer": {"type": "Adagrad"}}, max_grad_norm=0)[0].max_grad_norm is None


def test_contradictions_are_listed_key_by_key() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5], "eps": "1e-8", "weight_decay": 1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 5, "total_num_steps": 9},
        },
    }
    text = refusal(config, bf16=True, max_grad_norm=0.5, max_steps=10, warmup_steps=0.2, optim="adafactor")
    ranks = "1 processes x --per_device_train_batch_size 2 x --gradient_accumulation_steps 1 are 2"
    assert text.splitlines() == [
        "--deepspeed (a mapping) contradicts other arguments, or can't be followed:",
        "  train_micro_batch_size_per_gpu: 8, but --per_device_train_batch_size is 2",
        f"  train_batch_size: 64, but {ranks}",
        "  gradient_accumulation_steps: 4, but --gradient_accumulation_steps is 1",
        "  gradient_clipping: 1, but --max_grad_norm is 0.5",
        "  fp16.enabled: True, but --fp16 isn't given",
        '  bf16.enabled: False, but --bf16 is given: for float32 weights write "torch_autocast": {"enabled": true}',
        "  optimizer.params.lr: 0.001, but --learning_rate is 5e-05",
        "  optimizer.params.weight_decay: 1, but --weight_decay is 0.0",
        "  optimizer.params.betas: [0.5], but --adam_beta1 and --adam_beta2 are [0.9, 0.999]",
        "  optimizer.params.eps: '1e-8', but --adam_epsilon is 1e-08",
        "  optimizer.type: 'Adam', but --optim is 'adafactor': take one of them out",
        "  scheduler.params.warmup_max_lr: 0.002, but --learning_rate is 5e-05",
        "  scheduler.params.warmup_num_steps: 5, but --warmup_steps is 2",
        "  scheduler.params.total_num_steps: 9, but the number of steps is 10",
        '  where an argument says the same, write "auto" in the file, or the same value in both',
    ]


def test_what_agrees_is_taken() -> None:
    config = {
        "train_batch_size": 6,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 1}},
    }
    strategy, _ = handed_over(config, gradient_accumulation_steps=3, max_grad_norm=0.0, learning_rate=1e-3)
    assert strategy.max_grad_norm is None


def test_the_file_of_the_announcement_is_followed_where_the_arguments_agree(caplog: pytest.LogCaptureFixture) -> None:
    _deepspeed._warn.cache_clear()
    with caplog.at_level(logging.WARNING, logger="shardkit"):
        strategy, filled = handed_over(json.dumps(ANNOUNCED), fp16=True, **AGREEING)
    told = "DeepSpeed configuration (a text): fp16.hysteresis 2 is read as 1: the loss scale halves at each overflow"
    assert [record.message for record in caplog.records] == [told]
    assert (strategy.precision, strategy.loss_scale, strategy.loss_scale_window) == ("fp16", 2.0**16, 1000)
    assert filled["fp16"] == {"enabled": True, "loss_scale": 0, "min_loss_scale": 1}
    zero = {key: value for key, value in ANNOUNCED["zero_optimization"].items() if key != "cpu_offload"}
    assert filled["zero_optimization"] == {**zero, "offload_optimizer": {"device": "cpu"}}
    assert filled["optimizer"] == ANNOUNCED["optimizer"]
    assert "scheduler" not in filled
    text = refusal(ANNOUNCED)
    assert "fp16.enabled: True, but --fp16 isn't given" in text
    assert "scheduler.params.warmup_num_steps: 500, but --warmup_steps is 0" in text


def test_offload_of_the_older_form_is_that_of_today() -> None:
    older = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    zero = handed_over({"zero_optimization": older})[1]["zero_optimization"]
    assert zero == {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert handed_over({"zero_optimization": {"stage": 2, "cpu_offload": False}})[1]["zero_optimization"] == {
        "stage": 2
    }
    both = {"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}
    text = refusal({"zero_optimization": both})
    assert "zero_optimization.cpu_offload: False, but zero_optimization.offload_optimizer is {'device': 'cpu'}" in text


def test_the_loss_scale_of_the_file_is_that_of_the_session() -> None:
    fp16 = {"enabled": "auto", "initial_scale_power": 10, "loss_scale_window": 7, "hysteresis": 1}
    config = {"fp16": fp16, "zero_optimization": {"stage": 1}}
    strategy = arguments(config, fp16=True).to_strategy()
    assert (strategy.loss_scale, strategy.loss_scale_window) == (1024.0, 7)
    # Where no loss is scaled it says nothing.
    strategy = arguments(config).to_strategy()
    assert (strategy.loss_scale, strategy.loss_scale_window) == (2.0**16, 2000)
    config = {"fp16": {"initial_scale_power": "a", "loss_scale_window": 0.5, "hysteresis": 0}}
    text = refusal(config, fp16=True)
    assert "fp16.initial_scale_power: 'a', but it is a number" in text
    assert "fp16.loss_scale_window: 0.5, but it is a number of steps" in text
    assert "fp16.hysteresis: 0, but it is a number of overflows" in text
    fixed = {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": 2}}
    assert "fp16.loss_scale: 128, but the session's loss scale is a dynamic one" in refusal(fixed, fp16=True)


@pytest.mark.parametrize(
    ("sections", "stage", "filled"),
    [
        ({}, 2, {"bf16": {"enabled": True}}),
        ({}, 0, {}),
        ({"bf16": "auto"}, 1, {"bf16": {"enabled": True}}),
        ({"bfloat16": {"enabled": True}}, 1, {"bf16": {"enabled": True}}),
        ({"bf16": {"enabled": "auto"}}, 0, {"bf16": {"enabled": False}}),
        ({"bf16": {}, "fp16": {}}, 3, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}),
        ({"torch_autocast": {"enabled": "auto"}}, 2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": False}},
            2,
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": False}},
        ),
    ],
)
def test_weights_are_half_precision_as_to_deepspeed_unless_it_is_told_to_autocast(
    sections: dict[str, Any], stage: int, filled: dict[str, Any]
) -> None:
    strategy, config = handed_over({**sections, "zero_optimization": {"stage": stage}}, bf16=True)
    assert strategy.precision == "bf16"
    assert {key: config[key] for key in ("bf16", "fp16", "torch_autocast") if key in config} == filled


def test_precisions_that_contradict_the_arguments_are_listed() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    text = refusal({**zero, "torch_autocast": {"enabled": True}})
    assert "torch_autocast.enabled: True, but neither --fp16 nor --bf16 is given" in text
    text = refusal({**zero, "torch_autocast": {"enabled": True, "dtype": "float16"}}, bf16=True)
    assert "torch_autocast.dtype: 'float16', but --bf16 is given, which is 'bfloat16'" in text
    text = refusal({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, bf16=True)
    assert "with half weights of backend 'deepspeed' needs stage 1, 2 or 3" in text
    both = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    assert "torch_autocast.enabled: on, which keeps float32 weights" in refusal({**zero, **both}, bf16=True)


def test_what_the_backend_does_not_follow_is_refused_with_the_arguments() -> None:
    config = {
        "zero_optimisation": {},
        "flops_profiler": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    }
    with pytest.raises(StrategyError) as refused:
        arguments(config)
    text = str(refused.value)
    assert text.startswith("--deepspeed (a mapping), filled from the arguments, can't be followed:")
    assert "did you mean 'zero_optimization'?" in text
    assert "flops_profiler: shardkit doesn't drive this feature" in text
    assert "zero_optimization.offload_param.device: 'nvme' is not driven" in text
    assert "optimizer.type: 'Lamb' is not one that shardkit builds" in refusal({"optimizer": {"type": "Lamb"}})
    assert "optimizer: 'auto', but it is a table of settings" in refusal({"optimizer": "auto"})


def test_a_section_is_held_against_an_optimizer_that_is_handed_over_only_where_it_says_something() -> None:
    def section(params: Any, *handed: str) -> Any:
        config = {"optimizer": {"type": "AdamW", "params": params}, "scheduler": {"type": "WarmupLR"}}
        strategy = arguments(config, learning_rate=0.1).to_strategy(handed=handed)
        return json.loads(strategy.options["config"])["optimizer"]["params"]

    params = {"lr": 0.1, "eps": "auto", "betas": [0.9, 0.999]}
    assert section(params, "optimizer") == params
    # A schedule has set them.
    assert section(params, "optimizer", "schedule") == {"eps": "auto"}
    assert section("auto", "optimizer") == {}
    assert section(params)["weight_decay"] == 0.0


def test_the_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    args = arguments(str(path))
    path.write_text('{"zero_optimization": {"stage": 3}}')
    assert json.loads(args.to_strategy().options["config"])["zero_optimization"] == {"stage": 1}
    mapping: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    args = arguments(mapping)
    mapping["zero_optimization"]["stage"] = 2
    assert json.loads(args.to_strategy().options["config"])["zero_optimization"] == {"stage": 1}
    args.deepspeed = '{"zero_optimization": {"stage": 2}}'
    assert json.loads(args.to_strategy().options["config"])["zero_optimization"] == {"stage": 2}


def test_arguments_are_filled_in_anew_as_they_are_changed() -> None:
    args = arguments({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    args.learning_rate = 0.5
    assert json.loads(args.to_strategy().options["config"])["optimizer"]["params"]["lr"] == 0.5


@pytest.mark.parametrize("given", [{"zero_optimization": {"stage": 2}}, '{"zero_optimization": {"stage": 2}}'])
def test_the_arguments_keep_what_was_given_and_can_be_copied_and_stored(given: Any) -> None:
    args = arguments(given)
    assert args.deepspeed == given
    assert args.to_dict()["deepspeed"] == given
    assert json.loads(args.to_json_string())["deepspeed"] == given
    file = io.BytesIO()
    torch.save(args, file)
    file.seek(0)
    for copy in (torch.load(file, weights_only=False), dataclasses.replace(args, seed=7)):
        assert copy.deepspeed == given
        assert copy.to_strategy() == args.to_strategy()


LINEAR = {"warmup_type": "linear"}
RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    # The first step has the lowest rate, and so has the second, of which DeepSpeed counts from 0.
    "WarmupLR": (LINEAR, [0.0, 0.0, 1 / 4, 2 / 4, 3 / 4, 1.0, 1.0]),
    "WarmupDecayLR": (LINEAR, [0.0, 0.0, 1 / 4, 2 / 4, 3 / 4, (8 - 4) / 4, (8 - 5) / 4]),
    "WarmupCosineLR": (
        {**LINEAR, "cos_min_ratio": 0.2},
        [0.0, 0.0, 1 / 4, 2 / 4, 3 / 4, *(0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2))],
    ),
    "OneCycle": (
        {"cycle_min_lr": 0.2, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "decay_step_size": 1}
        | {"decay_lr_rate": 0.5},
        [0.2, 0.6, 1.0, 0.6, 0.2, 0.2 / 1.5, 0.2 / 2.0],
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 4.0},
        [0.1 * (1 + 4 * n / 2) for n in range(7)],
    ),
}
"""Settings of a schedule, beside 4 steps of warm-up of 8 to a rate of 1, and the rates of its steps by hand."""


def schedule_of(kind: str, optimizer: torch.optim.Optimizer, **given: Any) -> Any:
    params, _ = RATES[kind]
    warmup = {"warmup_steps": 4} if kind.startswith("Warmup") else {}
    args = arguments({"scheduler": {"type": kind, "params": params}}, learning_rate=1.0, **{**warmup, **given})
    return args.deepspeed_file.make_scheduler(optimizer, args, 8)


@pytest.mark.parametrize("kind", RATES)
def test_a_schedules_rates_are_those_of_its_formula(kind: str) -> None:
    optimizer = torch.optim.Adam([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(2)]}], lr=1.0)
    schedule = schedule_of(kind, optimizer)
    seen = []
    for _ in range(7):
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        assert schedule.get_last_lr()[0] == schedule.get_last_lr()[1]
        seen.append(schedule.get_last_lr()[0])
        schedule.step()
    torch.testing.assert_close(seen, RATES[kind][1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", RATES)
def test_a_schedule_is_made_anew_on_an_optimizer_that_another_one_stepped(kind: str) -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    for _ in range(2):
        schedule, seen = schedule_of(kind, optimizer), []
        for _ in range(7):
            seen += schedule.get_last_lr()
            schedule.step()
        torch.testing.assert_close(seen, RATES[kind][1], rtol=1e-12, atol=1e-15)


def test_the_first_ramp_is_logarithmic_as_deepspeed_s_default() -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=3e-5)
    args = arguments(ANNOUNCED, fp16=True, **AGREEING)
    schedule = args.deepspeed_file.make_scheduler(optimizer, args, 1000)
    seen = []
    for _ in range(4):
        seen += schedule.get_last_lr()
        schedule.step()
    expected = [0.0, *(3e-5 * math.log(n) / math.log(500) for n in (1, 2, 3))]
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=0)


def test_a_schedule_refuses_the_state_of_another_kind() -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="another kind of schedule, and the file's is WarmupLR"):
        schedule_of("WarmupLR", optimizer).load_state_dict(other.state_dict())


def test_making_a_schedule_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    import deepspeed.utils

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    try:
        schedule_of("WarmupLR", torch.optim.Adam([torch.zeros(1)], lr=1.0))
    finally:
        deepspeed.utils.logger.removeHandler(handler)
    assert messages == []


@pytest.mark.parametrize("kind", RATES)
def test_the_settings_of_a_schedule_are_those_of_deepspeed(kind: str) -> None:
    from deepspeed.runtime import lr_schedules

    signature = inspect.signature(getattr(lr_schedules, kind)).parameters
    assert set(_deepspeed_schedule.PARAMS[kind]) == set(signature) - {"optimizer"}


def test_all_schedules_of_deepspeed_are_there() -> None:
    from deepspeed.runtime import lr_schedules

    assert set(lr_schedules.VALID_LR_SCHEDULES) == set(_deepspeed_schedule.PARAMS) == set(RATES)


@pytest.mark.parametrize(
    ("section", "given", "text"),
    [
        ({"type": "StepLR"}, {}, "scheduler.type: 'StepLR', but shardkit builds WarmupLR, WarmupDecayLR"),
        ({"type": "WarmupLR", "lr": 1}, {}, "scheduler.lr: 1, but the section has 'type' and 'params'"),
        ({"type": "WarmupLR", "params": 3}, {}, "scheduler.params: 3, but it is a table of settings"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            {},
            "scheduler.params.warmup_steps: 3, but WarmupLR has no such setting; did you mean 'warmup_num_steps'?",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
            {},
            "scheduler.params.warmup_type: 'cubic', but it is 'log' or 'linear'",
        ),
        ({"type": "OneCycle"}, {}, "scheduler.params.cycle_min_lr: None, but OneCycle needs it"),
        (
            {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": "auto"}},
            {},
            "scheduler.params.lr_range_test_min_lr: 'auto', but no argument says it: write a value",
        ),
        (
            {"type": "LRRangeTest"},
            {"warmup_steps": 5},
            "scheduler.type: 'LRRangeTest', but --warmup_steps is 5, and it has no warm-up",
        ),
        (
            {"type": "WarmupLR"},
            {"lr_scheduler_type": "cosine"},
            "scheduler.type: 'WarmupLR', but --lr_scheduler_type is 'cosine'",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
            {"warmup_steps": 5},
            "scheduler.params.warmup_num_steps: 7, but --warmup_steps is 5",
        ),
        ("auto", {}, "scheduler: 'auto', but it is a table of settings"),
    ],
)
def test_a_schedule_that_is_none_or_contradicts_the_arguments_is_refused_with_them(
    section: Any, given: dict[str, Any], text: str
) -> None:
    assert text in refusal({"scheduler": section}, **given)


def test_steps_are_held_against_the_arguments_when_they_are_known() -> None:
    params = {"total_num_steps": 100, "warmup_num_steps": 20}
    args = arguments({"scheduler": {"type": "WarmupDecayLR", "params": params}}, warmup_steps=0.1)
    with pytest.raises(StrategyError) as refused:
        args.deepspeed_file.check_steps(args, 120, None)
    text = str(refused.value)
    assert "scheduler.params.warmup_num_steps: 20, but --warmup_steps is 12" in text
    assert "scheduler.params.total_num_steps: 100, but the number of steps is 120" in text
    args.deepspeed_file.check_steps(dataclasses.replace(args, warmup_steps=20), 100, None)


def test_a_setting_that_deepspeed_refuses_is_refused_by_the_files_name() -> None:
    section = {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0.5}}
    args = arguments({"scheduler": section})
    with pytest.raises(StrategyError, match=r"scheduler.params of --deepspeed \(a mapping\): lr_range_test_step_size"):
        args.deepspeed_file.make_scheduler(torch.optim.Adam([torch.zeros(1)]), args, 8)


def test_a_schedule_that_is_handed_over_is_that_of_the_file_or_refused(tmp_path: Path) -> None:
    from deepspeed.runtime.lr_schedules import WarmupLR

    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    args = arguments(config, learning_rate=1.0, warmup_steps=5)
    file = args.deepspeed_file
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    good, bad = (file.take(optimizer, WarmupLR(optimizer, 0.0, 1.0, 5, kind)) for kind in ("log", "linear"))
    for _ in range(2):
        file.check_steps(args, 10, good)
        good.step()
    with pytest.raises(StrategyError, match="warmup_type: 'log', but it was made with 'linear'"):
        file.check_steps(args, 10, bad)
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(StrategyError, match=r"scheduler\.type of .* is 'WarmupLR', but a StepLR was handed"):
        file.take(optimizer, plain)
    file = arguments({"optimizer": {"type": "AdamW"}}).deepspeed_file
    assert file.take(optimizer, plain) is plain
    with pytest.raises(StrategyError, match="the StepLR that was handed to the Trainer steps an optimizer of its own"):
        file.take(None, plain)


def test_the_trainer_refuses_a_schedule_of_another_class_when_it_is_made(tmp_path: Path) -> None:
    import shardkit.transformers

    model = tiny.t5()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(StrategyError, match="but a StepLR was handed to the Trainer"):
        shardkit.transformers.Trainer(
            model, arguments({"scheduler": {"type": "WarmupLR"}}), optimizers=(optimizer, schedule)
        )
