"""DeepSpeed configuration files, held against the strategy: no process is needed, nor DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import Strategy
from shardkit.errors import StrategyError


def planned(tmp_path: Any, config: Any, settings: str = "", world_size: int = 2, **fields: Any) -> Any:
    from shardkit_deepspeed import DeepSpeedOptions
    from shardkit_deepspeed._plan import make_plan

    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    given: dict[str, Any] = dict(pair.split("=") for pair in settings.split(",")) if settings else {}
    if "stage" in given:
        given["stage"] = int(given["stage"])
    if "half_weights" in given:
        given["half_weights"] = given["half_weights"] == "true"
    options = DeepSpeedOptions(config=str(path), **given)
    return make_plan(Strategy("deepspeed", **fields), options, elements=1_000_000, world_size=world_size, device="cpu")


def test_a_file_that_is_missing_or_no_json_is_refused_by_name(tmp_path: Any) -> None:
    from shardkit_deepspeed._config import read_config

    with pytest.raises(StrategyError, match=r"there is no DeepSpeed configuration '.*nowhere\.json'"):
        read_config(str(tmp_path / "nowhere.json"))
    with pytest.raises(StrategyError, match=r"ds\.json' is not JSON"):
        planned(tmp_path, "{,}")
    with pytest.raises(StrategyError, match=r"ds\.json' holds a list, not an object"):
        planned(tmp_path, "[1]")
    with pytest.raises(StrategyError, match="names the key 'bf16' twice"):
        planned(tmp_path, '{"bf16": {}, "bf16": {}}')


def test_a_configuration_may_be_given_as_text() -> None:
    from shardkit_deepspeed import DeepSpeedOptions
    from shardkit_deepspeed._plan import make_plan

    def of(text: str, **fields: Any) -> Any:
        options = DeepSpeedOptions(config=text)
        return make_plan(Strategy("deepspeed", **fields), options, elements=1000, world_size=2, device="cpu")

    assert of('{"zero_optimization": {"stage": 3}}').stage == 3
    with pytest.raises(StrategyError, match=r"^DeepSpeed configuration given as text is not JSON: it names .* twice"):
        of('{"bf16": {}, "bf16": {}}')
    with pytest.raises(StrategyError, match=r"^DeepSpeed configuration given as text can't be followed:\n  zero: Deep"):
        of('{"zero": 1}')
    with pytest.raises(
        StrategyError, match=r"""write Strategy\("deepspeed", precision='bf16', options=\{"config": '{...}'"""
    ):
        of('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    with pytest.raises(StrategyError, match="given as text with half weights of backend 'deepspeed' needs stage 1, 2"):
        of('{"bf16": {"enabled": true}}', precision="bf16")


def test_an_optimizer_section_is_read_before_there_is_a_model(tmp_path: Any) -> None:
    with pytest.raises(StrategyError, match=r"'.*ds\.json': optimizer\.type: 'Lamb' is not one that shardkit builds"):
        planned(tmp_path, {"optimizer": {"type": "Lamb"}})


def test_unknown_removed_and_undriven_keys_are_listed_at_once(tmp_path: Any) -> None:
    config = {
        "zero_optimisation": {},
        "sparse_attention": {},
        "flops_profiler": {"enabled": True},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket": 5, "zero_quantized_weights": True},
    }
    with pytest.raises(StrategyError) as refusal:
        planned(tmp_path, config)
    text = str(refusal.value)
    assert (
        "zero_optimisation: DeepSpeed knows no such key, and would ignore it; did you mean 'zero_optimization'?" in text
    )
    assert "sparse_attention: DeepSpeed has removed it" in text
    assert "flops_profiler: shardkit doesn't drive this feature" in text
    assert "scheduler: shardkit doesn't build schedules" in text
    assert "did you mean 'stage3_prefetch_bucket_size'?" in text
    assert "zero_optimization.zero_quantized_weights: True is not driven" in text


def test_contradictions_between_file_and_strategy_are_listed_key_by_key(tmp_path: Any) -> None:
    config = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "train_batch_size": 100,
        "train_micro_batch_size_per_gpu": 8,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    with pytest.raises(StrategyError) as refusal:
        planned(tmp_path, config, "stage=2,offload_optimizer=none", accumulate=2, max_grad_norm=1.0)
    text = str(refusal.value)
    for line in (
        "gradient_accumulation_steps: 4, but the strategy says accumulate=2",
        "gradient_clipping: 0.5, but the strategy says max_grad_norm=1.0",
        "train_batch_size: 100, but 8 samples x 2 micro-batches x 2 ranks are 32",
        "fp16.enabled: on, but the strategy says precision='fp32': write Strategy(\"deepspeed\", precision='fp16'",
        "zero_optimization.stage: 1, but the strategy says stage=2",
        "zero_optimization.offload_optimizer: 'cpu', but the strategy says offload_optimizer='none'",
    ):
        assert line in text


def test_auto_values_are_filled_in_and_all_that_changes_numbers_is_written(tmp_path: Any) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": False},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": 5e4,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    plan = planned(tmp_path, config, accumulate=3, max_grad_norm=0.5)
    assert plan.stage == 3
    assert plan.config["train_batch_size"] == 48
    assert plan.config["gradient_accumulation_steps"] == 3
    assert plan.config["gradient_clipping"] == 0.5
    assert plan.config["fp16"] == {"enabled": False}
    zero = plan.config["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == 50_000
    assert zero["reduce_bucket_size"] == 2**18
    assert zero["stage3_max_live_parameters"] == 0
    assert '"auto"' not in json.dumps(plan.config)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_file_with_half_precision_enabled_means_half_weights_of_the_strategys_precision(
    tmp_path: Any, precision: str
) -> None:
    config = {precision: {"enabled": True}, "zero_optimization": {"stage": 1}}
    for settings in ("", "half_weights=true"):
        plan = planned(tmp_path, config, settings, precision=precision)
        assert plan.half == precision
        assert plan.config[precision]["enabled"] is True
        assert plan.config["data_types"]["grad_accum_dtype"] == plan.config["communication_data_type"] == "fp32"
    # The session's scaler has scaled the losses.
    assert plan.config["fp16"].get("loss_scale", 1.0) == 1.0
    assert planned(tmp_path, {"zero_optimization": {"stage": 1}}, precision=precision).half is None
    auto = {precision: {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    assert planned(tmp_path, auto, precision=precision).half is None
    assert planned(tmp_path, auto, "half_weights=true", precision=precision).half == precision


def test_a_file_with_torch_autocast_agrees_with_the_precision_without_half_weights(tmp_path: Any) -> None:
    for precision, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        config = {"torch_autocast": {"enabled": True, "dtype": dtype}, "zero_optimization": {"stage": 1}}
        plan = planned(tmp_path, config, precision=precision)
        assert plan.half is None
        assert plan.config["torch_autocast"] == {"enabled": False}
        with pytest.raises(StrategyError, match=f"torch_autocast.enabled: on in {dtype}.*precision='fp32'"):
            planned(tmp_path, config)
        with pytest.raises(StrategyError, match="keeps float32 weights, but half_weights is asked for"):
            planned(tmp_path, config, "half_weights=true", precision=precision)


def test_contradictions_about_precision_are_listed_key_by_key(tmp_path: Any) -> None:
    config = {
        "bf16": {"enabled": False, "enable": True},
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "loss_scale": 128,
            "initial_scale_power": 12,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 0.5,
            "fp16_master_weights_and_grads": True,
        },
        "data_types": {"grad_accum_dtype": "fp16", "param_dtype": "bf16", "buffer_dtype": "fp16"},
        "zero_optimization": {"stage": 1},
    }
    with pytest.raises(StrategyError) as refusal:
        planned(tmp_path, config, "half_weights=false", precision="fp16", loss_scale=1024.0, loss_scale_window=500)
    text = str(refusal.value)
    for line in (
        "bf16.enable: DeepSpeed knows no such key; did you mean 'enabled'?",
        "fp16.enabled: on, which means half_weights, but the strategy says half_weights=False",
        "fp16.loss_scale: 128, but the session's loss scale is a dynamic one",
        "fp16.initial_scale_power: 12, but the strategy says loss_scale=1024: write 10 or 'auto'",
        "fp16.loss_scale_window: 1000, but the strategy says loss_scale_window=500: write 500 or 'auto'",
        "fp16.hysteresis: 2, but the session halves the loss scale at each overflow: write 1 or 'auto'",
        "fp16.min_loss_scale: 0.5, but the session's loss scale doesn't fall below 1",
        "fp16.fp16_master_weights_and_grads: True, but masters and gradients are float32",
        "data_types.grad_accum_dtype: 'fp16', but under this strategy gradients are fp32: write 'fp32'",
        "data_types.param_dtype: 'bf16', but under this strategy weights are fp32",
        "data_types.buffer_dtype: 'fp16', but under this strategy buffers are fp32",
    ):
        assert line in text
    assert "auto_cast" not in text
    with pytest.raises(StrategyError, match=r"bf16\.enabled: off, but the strategy says half_weights=True in bf16"):
        planned(tmp_path, {"bf16": {"enabled": False}}, "half_weights=true,stage=1", precision="bf16")


@pytest.mark.parametrize(
    ("settings", "precision", "text"),
    [
        ("half_weights=true,stage=1", "fp32", "option half_weights of backend 'deepspeed' keeps .*'fp32'"),
        ("half_weights=true,stage=0", "bf16", "option half_weights of backend 'deepspeed' needs stage 1, 2 or 3"),
    ],
)
def test_half_weights_without_a_precision_or_a_stage_are_refused(
    tmp_path: Any, settings: str, precision: str, text: str
) -> None:
    with pytest.raises(StrategyError, match=text):
        planned(tmp_path, {}, settings, precision=precision)


def test_clipping_is_off_unless_asked_for_whatever_deepspeed_would_do(tmp_path: Any) -> None:
    assert planned(tmp_path, {"zero_optimization": {"stage": 2}}).config["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("stage=0,offload_optimizer=cpu", "has no effect at stage 0"),
        ("stage=2,offload_parameters=cpu", "has no effect at stage 2"),
    ],
)
def test_offload_that_deepspeed_would_ignore_is_refused(tmp_path: Any, settings: str, text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        planned(tmp_path, {}, settings)


def test_the_optimizer_section_becomes_the_torch_optimizer_that_it_means(tmp_path: Any) -> None:
    from shardkit_deepspeed._config_optimizer import check_section, from_section

    params = [nn.Parameter(torch.ones(2))]
    made = from_section({"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": "auto"}}, "ds.json", params)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["betas"] == (0.8, 0.9)
    # DeepSpeed's own AdamW doesn't decay unless told to; torch's does.
    assert made.defaults["weight_decay"] == 0.0
    plain_adam = from_section({"type": "Adam", "params": {"adam_w_mode": False}}, "ds.json", params)
    assert type(plain_adam) is torch.optim.Adam
    with pytest.raises(StrategyError, match=r"optimizer\.type: 'Lamb' is not one that shardkit builds"):
        from_section({"type": "Lamb"}, "ds.json", params)
    with pytest.raises(StrategyError, match=r"optimizer\.params\.momentun: .* did you mean 'momentum'"):
        from_section({"type": "SGD", "params": {"momentun": 0.9}}, "ds.json", params)
    check_section({"type": "AdamW", "params": {"lr": 0.1}}, "ds.json", torch.optim.AdamW(params, lr=0.1))
    with pytest.raises(StrategyError, match=r"optimizer\.params\.lr: 0\.1, but the optimizer has 0\.2"):
        check_section({"type": "AdamW", "params": {"lr": 0.1}}, "ds.json", torch.optim.AdamW(params, lr=0.2))


def test_the_rate_of_a_section_is_that_of_an_optimizer_before_its_schedule() -> None:
    from shardkit_deepspeed._config_optimizer import check_section

    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    check_section({"type": "AdamW", "params": {"lr": 0.1}}, "ds.json", optimizer)
    with pytest.raises(StrategyError, match=r"optimizer\.params\.lr: 0\.0, but the optimizer has 0\.1"):
        check_section({"type": "AdamW", "params": {"lr": 0.0}}, "ds.json", optimizer)


def test_the_known_keys_are_those_that_deepspeed_reads() -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    config = pytest.importorskip("deepspeed.runtime.config")
    from shardkit_deepspeed import _keys

    fields = zero_config.DeepSpeedZeroConfig.model_fields
    assert set(fields) | {field.alias for field in fields.values() if field.alias} == _keys.ZERO - _keys.ZERO_REMOVED
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == _keys.REMOVED
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == _keys.ZERO_REMOVED
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    names = {
        *offload.DeepSpeedZeroOffloadOptimizerConfig.model_fields,
        *offload.DeepSpeedZeroOffloadParamConfig.model_fields,
    }
    assert names <= _keys.OFFLOAD_PASSED | _keys.OFFLOAD_FIXED.keys()


def test_describing_the_backend_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, shardkit_deepspeed as p; p.shardkit_describe(); assert not {'torch', 'deepspeed'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
