"""A benchmark's results, made up so that what is drawn of them can be told by hand."""

from __future__ import annotations

from typing import Any

from shardkit.bench import Bench, Row, Spread

MIB = 2**20


def around(value: float) -> Spread:
    """Return a spread of six values whose quartiles lie a tenth from the median."""
    return Spread(value, 0.9 * value, 1.1 * value, 6)


def measured(strategy: str, precision: str, batch: int, speed: float, ratio: float, **more: Any) -> Row:
    values: dict[str, Any] = {
        "batch": batch,
        "peak_memory": (90 * MIB, 100 * MIB),
        "step_seconds": around(2 * batch / speed),
        "samples_per_second": around(speed),
        "tokens_per_second": around(256 * speed),
        "train_seconds": 1000 / speed,
        "evaluation_samples_per_second": around(4.0),
        "evaluation_seconds": 50.0,
        "batch_ratio": batch / 16,
        "speed_ratio": Spread(ratio, ratio - 0.01, ratio + 0.01, 3),
        "memory_ratio": 1.0,
        **more,
    }
    return Row(strategy, precision, "measured", **values)


OUT = Row("c", "fp32", "out of memory", note="not even a batch of 1 fits into 1 GiB", batch=1, trials=1)

ROWS = (
    measured("a", "fp32", 16, 50.0, 1.0),
    measured("a", "bf16", 20, 100.0, 2.0, evaluation_note="RuntimeError: no beams", evaluation_seconds=None),
    measured("b:stage=2,offload=cpu", "fp32", 24, 51.0, 1.02),
    OUT,
    Row("b:stage=2,offload=cpu", "fp16", "refused", note="backend 'b' trains in fp32, not in fp16"),
    Row("d", "fp32", "missing", note="backend 'd' needs its library"),
    Row("e", "fp32", "failed", note="batch 4: rank 1 was ended by SIGSEGV", details='at <line> "3" & $x^2$'),
)

SETTINGS: dict[str, Any] = {
    "workload": "t5-large:target=64",
    "device": "cpu",
    "processes": 2,
    "memory": 2**30,
    "batch": None,
    "accumulate": 1,
    "items": 1000,
    "evaluation_items": 200,
    "steps": 2,
    "warm_up_steps": 2,
    "repeats": 3,
    "evaluated_batches": {"loss": 3, "generated": 1, "largest_generated": 8},
}


def bench(**changes: Any) -> Bench:
    """Return the results with some settings, or rows, changed."""
    rows = changes.pop("rows", ROWS)
    noise = changes.pop("noise", (1.04, 0.99, 1.0))
    hardware = {"processor": "a processor", "cores": 2, "memory": 2**34, "load": 0.5}
    return Bench({**SETTINGS, **changes}, {"torch": "2.13"}, hardware, "2026-11-30", "shardkit bench x", rows, noise)
