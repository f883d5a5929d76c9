"""The Trainer under ``--deepspeed FILE``: its losses, its optimizer, its schedule."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

import shardkit.transformers
from shardkit import testing
from shardkit.errors import StrategyError
from tests.transformers import tiny
from tests.transformers.test_deepspeed_file import AGREEING, ANNOUNCED, RATES

LOSS = 1e-6
"""Relative, in float32: sums of two ranks in another order."""

CPU = {"device": "cpu"}
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, offload": {"stage": 2, "offload_optimizer": CPU},
    "3": {"stage": 3},
    "3, offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
SHARED = {"t5": ("0", "1", "2", "3"), "gpt2": ("2", "2, offload", "3")}
"""Stages that train in one launch by default; the others are slow."""


@cache
def reference(model: str, folder: str) -> tiny.Training:
    return testing.run(tiny.own, folder, model)[0]


@cache
def stages(model: str, folder: str, names: tuple[str, ...]) -> list[dict[str, tiny.Training]]:
    return testing.run(_train_stages, folder, model, names, timeout=120)


def _train_stages(folder: str, model: str, names: tuple[str, ...]) -> dict[str, tiny.Training]:
    return {name: _train(folder, model, {"zero_optimization": STAGES[name]})[0] for name in names}


def _train(
    folder: str, model: str, deepspeed: Any, resume: str | None = None, **arguments: Any
) -> tuple[tiny.Training, dict[str, Any]]:
    """Return what a training showed, and what was left at its end."""
    made = tiny.trainer(shardkit.transformers, folder, model, deepspeed=deepspeed, **arguments)
    seen = tiny.trained(made, resume)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in made.optimizer.param_groups]
    left = {
        "groups": groups,
        "dtype": next(made.model.parameters()).dtype,
        "schedule": made.lr_scheduler.state_dict(),
        "skipped": made.session.skipped_steps,
    }
    made.session.close()
    return seen, left


def assert_same(seen: tiny.Training, expected: tiny.Training) -> None:
    torch.testing.assert_close(seen.losses, expected.losses, rtol=LOSS, atol=0)
    torch.testing.assert_close(seen.norms, expected.norms, rtol=LOSS, atol=0)
    torch.testing.assert_close(seen.rates, expected.rates, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(seen.metrics["eval_loss"], expected.metrics["eval_loss"], rtol=LOSS, atol=0)


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        pytest.param(model, stage, marks=[] if stage in SHARED[model] else [pytest.mark.slow])
        for model in SHARED
        for stage in STAGES
    ],
)
def test_losses_are_those_of_the_librarys_own_trainer(
    model: str, stage: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    names = SHARED[model] if stage in SHARED[model] else (stage,)
    for rank in stages(model, folder, names):
        assert_same(rank[stage], reference(model, folder))


def plain(folder: str, factors: list[float], betas: list[float] | None = None, **arguments: Any) -> tiny.Training:
    """Train by the library's own Trainer with torch's AdamW over all parameters, at rates and betas that are given."""
    made = tiny.trainer(transformers, folder, **arguments)
    args = made.args
    optimizer = torch.optim.AdamW(
        made.model.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
    )
    made.optimizer, made.lr_scheduler = optimizer, LambdaLR(optimizer, lambda step: [*factors, 0.0][step])

    class Betas(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert betas is not None
            for group in optimizer.param_groups:
                group["betas"] = (betas[state.global_step], 0.99)

    if betas is not None:
        made.add_callback(Betas())
    return tiny.trained(made)


def _of_file(folder: str, stage: int) -> dict[str, Any]:
    """Train with an optimizer and schedules of the file, and once more from the middle."""
    zero = {"zero_optimization": {"stage": stage}}
    decaying = {**zero, "optimizer": {"type": "AdamW"}, "scheduler": _section("WarmupDecayLR")}
    cycling = {**zero, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": _section("OneCycle")}
    cycling["scheduler"]["params"] |= {"cycle_min_lr": 2e-3, "cycle_max_lr": 1e-2}
    cosine = {**zero, "scheduler": _section("WarmupCosineLR")}
    seen = {}
    for name, config, arguments in (
        ("decaying", decaying, {"warmup_steps": 2}),
        ("cycling", cycling, {"warmup_steps": 0}),
    ):
        inner = str(Path(folder, name))
        seen[name] = _train(inner, "t5", config, save_strategy="steps", save_steps=2, **arguments)
        again = str(Path(inner, "checkpoint-4"))
        seen[f"{name}, resumed"] = _train(str(Path(inner, "again")), "t5", config, again, **arguments)
    made = tiny.trainer(shardkit.transformers, folder, deepspeed=cosine)
    seen["cosine"] = tiny.trained(made), None
    seen["cosine, once more"] = tiny.trained(made), None
    made.session.close()
    return seen


def _section(kind: str) -> dict[str, Any]:
    return {"type": kind, "params": dict(RATES[kind][0])}


@cache
def of_file(folder: str, stage: int) -> list[dict[str, Any]]:
    return testing.run(_of_file, folder, stage, timeout=120)


STAGE = pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
DECAYING = [0.0, 0.0, 1 / 2, (6 - 2) / 4, (6 - 3) / 4, (6 - 4) / 4]
CYCLING = [0.2, 0.6, 1.0, 0.6, 0.2, 0.2 / 1.5]
MOMENTA = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9]
"""DeepSpeed starts OneCycle at the lowest momentum, and goes on from near the highest."""


@STAGE
def test_optimizer_and_schedule_of_the_file_train_as_torchs_over_all_parameters(
    stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = testing.run(plain, str(tmp_path_factory.mktemp("plain")), DECAYING)[0]
    for rank in of_file(str(tmp_path_factory.getbasetemp() / f"file-{stage}"), stage):
        seen, left = rank["decaying"]
        assert_same(seen, expected)
        torch.testing.assert_close(seen.rates, [1e-2 * factor for factor in DECAYING], rtol=1e-12, atol=1e-15)
        # One group, whose norms and biases decay too.
        assert [group["weight_decay"] for group in left["groups"]] == [0.1]


@STAGE
def test_momentum_cycles_with_the_rate_under_onecycle(stage: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = testing.run(plain, str(tmp_path_factory.mktemp("plain")), CYCLING, MOMENTA)[0]
    for rank in of_file(str(tmp_path_factory.getbasetemp() / f"file-{stage}"), stage):
        assert_same(rank["cycling"][0], expected)


@STAGE
@pytest.mark.parametrize("name", ["decaying", "cycling"])
def test_a_schedule_of_the_file_goes_on_from_a_checkpoint(
    name: str, stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for rank in of_file(str(tmp_path_factory.getbasetemp() / f"file-{stage}"), stage):
        (whole, left), (resumed, left_resumed) = rank[name], rank[f"{name}, resumed"]
        assert resumed.losses == whole.losses
        assert resumed.rates == whole.rates
        assert left_resumed == left
        assert left["schedule"] == {"last_batch_iteration": 5}
        for key, value in whole.weights.items():
            assert torch.equal(resumed.weights[key], value), key


@STAGE
def test_a_schedule_of_the_file_begins_anew_in_another_training(
    stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    floor = 0.2
    factors = [0.0, 0.0, 1 / 2, *(floor + (1 - floor) * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3))]
    for rank in of_file(str(tmp_path_factory.getbasetemp() / f"file-{stage}"), stage):
        for name in ("cosine", "cosine, once more"):
            rates = rank[name][0].rates[-6:]
            torch.testing.assert_close(rates, [1e-2 * factor for factor in factors], rtol=1e-12, atol=1e-15)


BF16 = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "autocast": {"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": "auto"}},
    "half weights": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
}
OVERFLOWING = {
    "zero_optimization": {"stage": 2},
    "torch_autocast": {"enabled": "auto"},
    "fp16": {"enabled": False, "initial_scale_power": 20, "hysteresis": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
}
UNANNOUNCED = {**ANNOUNCED, "fp16": {"enabled": "auto"}}


def _others(folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {name: _train(folder, "gpt2", config, bf16=True) for name, config in BF16.items()}
    seen["fp16"] = _train(folder, "gpt2", OVERFLOWING, fp16=True)
    seen["announced"] = _train(folder, "t5", json.dumps(UNANNOUNCED), **AGREEING)
    seen["handed"] = _train_handed(folder, None, lr=1e-2, weight_decay=0.3)
    seen["handed, with schedule"] = _train_handed(folder, "OneCycle", lr=1e-2, weight_decay=0.3)
    with pytest.raises(StrategyError) as refused:
        _train_handed(folder, None, lr=2e-2, weight_decay=0.1)
    seen["handed, another"] = str(refused.value)
    return seen


def lr_schedules() -> Any:
    from deepspeed.runtime import lr_schedules

    return lr_schedules


def _train_handed(folder: str, kind: str | None, **settings: float) -> tiny.Training:
    """Hand over an optimizer beside a file that describes it but for its weight decay, and a schedule of a kind."""
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": "auto"}},
    }
    params = {**RATES["OneCycle"][0], "cycle_min_lr": 2e-3, "cycle_max_lr": 1e-2}
    if kind is not None:
        config["scheduler"] = {"type": kind, "params": params}
    made = tiny.trainer(shardkit.transformers, folder, deepspeed=config, warmup_steps=2 if kind is None else 0)
    model = made.model
    optimizer = torch.optim.AdamW(list(model.parameters()), **settings)
    schedule = None if kind is None else getattr(lr_schedules(), kind)(optimizer, **params)
    made = shardkit.transformers.Seq2SeqTrainer(
        model=model,
        args=made.args,
        train_dataset=made.train_dataset,
        eval_dataset=made.eval_dataset,
        optimizers=(optimizer, schedule),
    )
    made.remove_callback(transformers.PrinterCallback)
    seen = tiny.trained(made)
    assert made.session.optimizer is optimizer
    made.session.close()
    return seen


@cache
def others(folder: str) -> list[dict[str, Any]]:
    return testing.run(_others, folder, timeout=120)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.getbasetemp() / "others")


def test_bf16_with_float32_weights_is_that_of_the_library(base: str) -> None:
    expected = testing.run(partial(tiny.own, bf16=True), base, "gpt2")[0]
    for rank in others(base):
        for name in ("stage 0", "autocast"):
            assert_same(rank[name][0], expected)
            assert rank[name][1]["dtype"] == torch.float32


def test_bf16_of_the_file_keeps_the_weights_in_it(base: str) -> None:
    for rank in others(base):
        seen, left = rank["half weights"]
        assert left["dtype"] == torch.bfloat16
        # bfloat16 has 8 bits.
        torch.testing.assert_close(seen.losses, rank["autocast"][0].losses, rtol=2**-9, atol=0)
        assert seen.losses != rank["autocast"][0].losses


def test_a_step_that_overflows_does_not_advance_the_schedule_of_the_file(base: str) -> None:
    for rank in others(base):
        seen, left = rank["fp16"]
        overflows = [not math.isfinite(norm) for norm in seen.norms]
        assert 0 < sum(overflows) < 4
        assert left["skipped"] == sum(overflows)
        assert left["schedule"] == {"last_batch_iteration": 5 - sum(overflows)}
        moved, factors = 0, [0.0, 0.0, 1 / 2, 1.0, 1.0, 1.0]
        for rate, overflowed in zip(seen.rates, overflows, strict=True):
            assert rate == 1e-2 * factors[moved]
            moved += not overflowed


def test_the_file_of_the_announcement_trains_as_torchs_optimizer_at_its_rates(base: str) -> None:
    """In float32, since a CPU has no fp16 weights."""
    factors = [0.0, *(math.log(n) / math.log(500) for n in range(1, 6))]
    expected = testing.run(partial(plain, **AGREEING), base, factors)[0]
    for rank in others(base):
        assert_same(rank["announced"][0], expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_file_of_the_announcement_trains_fp16_weights_on_cuda(tmp_path: Path) -> None:
    given = {**AGREEING, "fp16": True, "use_cpu": False}
    expected = testing.run(partial(tiny.own, **AGREEING), str(tmp_path), "t5")[0]
    for seen, left in testing.run(partial(_train, **given), str(tmp_path), "t5", json.dumps(ANNOUNCED)):
        assert left["dtype"] == torch.float16
        # Rates are so low that the weights hardly move: fp16 has 11 bits.
        torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-2, atol=0)


def test_an_optimizer_that_is_handed_over_agrees_with_the_file_or_is_refused(base: str) -> None:
    factors = [0.0, 1 / 2, *((6 - n) / 4 for n in (2, 3, 4, 5))]
    expected = testing.run(partial(plain, weight_decay=0.3), base, factors)[0]
    cycled = testing.run(partial(plain, weight_decay=0.3), base, CYCLING, MOMENTA)[0]
    for rank in others(base):
        assert_same(rank["handed"], expected)
        assert_same(rank["handed, with schedule"], cycled)
        text = rank["handed, another"]
        assert "contradicts the optimizer that was handed to prepare" in text
        assert "optimizer.params.lr: 0.01, but the optimizer has 0.02" in text
        assert "weight_decay" not in text


def _engine_rates(kind: str) -> list[float]:
    """Return the rates of the first steps of DeepSpeed's own engine."""
    import deepspeed

    # Its op for shared memory would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(2, 1)
    warmup = {"warmup_num_steps": 4} if kind.startswith("Warmup") else {}
    total = {} if kind in ("WarmupLR", "OneCycle", "LRRangeTest") else {"total_num_steps": 8}
    highest = {"warmup_max_lr": 1.0} if kind in ("WarmupLR", "WarmupDecayLR") else {}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "scheduler": {"type": kind, "params": {**RATES[kind][0], **warmup, **total, **highest}},
        },
    )
    seen = []
    for _ in range(7):
        seen.append(float(engine.optimizer.param_groups[0]["lr"]))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return seen


def _engines() -> dict[str, list[float]]:
    return {kind: _engine_rates(kind) for kind in RATES}


def test_the_formulas_of_the_schedules_are_those_of_deepspeeds_engine() -> None:
    (seen,) = testing.run(_engines, processes=1, timeout=120)
    for kind, (_, expected) in RATES.items():
        torch.testing.assert_close(seen[kind], expected, rtol=1e-12, atol=1e-15)
