"""Results made by hand, with every verdict, every kind of failure, and what is hard to print."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardkit.parity._results import (
    Comparison,
    Diagnosis,
    Difference,
    Distances,
    Failure,
    Gaps,
    Measured,
    Parting,
    Report,
    Row,
    Side,
)
from shardkit.parity._sketch import WIDTH
from shardkit.parity._trace import Trace

HOSTILE = (
    "<script>alert('x')</script> & \"q\" ]]> $\\frac{$ [bold red]x[/] \x1b[31mred\x1b[0m \x00\x08\x0b￾\ud800 日本 é"
)
"""Markup, formulas, colours, and characters that XML and UTF-8 can't hold."""

STAGES = ("install", "import", "refused", "error", "crash", "timeout")


def trace(losses: list[float]) -> Trace:
    steps = len(losses)
    return Trace(
        facts={"parameters": {}},
        losses=torch.tensor(losses, dtype=torch.float64).reshape(steps, 1, 1),
        batches=torch.zeros(steps, 1, 1, dtype=torch.int64),
        rates=torch.zeros(steps, 1, dtype=torch.float64),
        applied=torch.ones(steps, dtype=torch.bool),
        seconds=torch.zeros(steps, 1, dtype=torch.float64),
        gradients=torch.zeros(steps, 1, 0, WIDTH, dtype=torch.float64),
        weights=torch.zeros(steps + 1, 1, 0, WIDTH, dtype=torch.float64),
    )


def curve(steps: int, shift: float = 0.0) -> list[float]:
    return [3.5 * math.exp(-step / (0.4 * steps)) + 0.4 + shift * step / steps for step in range(steps)]


def grown(steps: int, start: int, least: float = 3e-8, most: float = 2e-2) -> list[float]:
    """Return gaps that are exactly 0 before a step, and grow evenly on a log axis from there."""
    span = max(steps - start, 1)
    return [0.0 if step < start else least * (most / least) ** ((step - start) / span) for step in range(1, steps + 1)]


def gaps(steps: int, parameters: int, start: int, most: float = 2e-2) -> Gaps:
    names = [f"encoder.block.{place // 4}.layer.{place % 4}.SelfAttention.q.weight" for place in range(parameters)]
    rows = [
        grown(steps, start + place % 3, 1e-8, most / (1 + place)) if place % 5 != 4 else [0.0] * steps
        for place in range(parameters)
    ]
    return Gaps(
        loss=grown(steps, start + 1, most=most),
        gradient_norm=grown(steps, start, most=most),
        gradients=grown(steps, start, 5e-8, most),
        weights=grown(steps, start + 1, 1e-8, most / 4),
        names=names,
        parameter_gradients=rows,
        parameter_weights=rows,
    )


def comparison(verdict: Any = "different", steps: int = 30, parameters: int = 12, **other: Any) -> Comparison:
    """Return a comparison that parts at its third step, if it does."""
    apart = verdict in ("different", "round-off") and steps > 0
    start = min(3, steps)
    losses = curve(steps) if steps else []
    settings: dict[str, Any] = {
        "a": "runs/before.trace",
        "b": "runs/after.trace",
        "verdict": verdict,
        "differences": [],
        "first_bit": Parting(start, "gradient", "encoder.block.0.q.weight", 0.25, 0.2500001, 4e-7, None, 1)
        if apart
        else None,
        "parting": Parting(min(start + 2, steps), "loss", "", 2.75, 2.81, 0.0218, 251658.0)
        if verdict == "different" and steps
        else None,
        "diagnoses": [],
        "gaps": gaps(steps, parameters, start, 2e-2 if verdict == "different" else 4e-7)
        if apart
        else Gaps([0.0] * steps, [0.0] * steps, [0.0] * steps, [0.0] * steps, ["w"], [[0.0] * steps], [[0.0] * steps])
        if verdict == "identical"
        else None,
        "loss_a": losses,
        "loss_b": curve(steps, 0.3) if verdict == "different" and steps else list(losses),
        "final_weights": 0.0034 if verdict == "different" else 2e-7 if apart else 0.0,
        "final_ulps": 41000.0 if verdict == "different" else 3.0 if apart else 0.0,
    }
    return Comparison(**(settings | other))


DIFFERENCES = [
    Difference("version", "torch", "2.13.0", "2.14.0"),
    Difference("configuration", "ZeroConfig.reduce_bucket_size", 500_000_000, 50_000_000),
    Difference("configuration", "Config.gradient_clipping", None, 1.0, missing="a"),
    Difference("data", "step 4", 123, 456),
    Difference("environment", HOSTILE, HOSTILE, float("nan")),
]

DIAGNOSES = [
    Diagnosis(
        "accumulation",
        "the gradients of run B are 2 times those of run A in every step: they are summed over the accumulation "
        "window, not averaged",
        {"ratio": 2.0000001, "expected": 2, "steps": 30},
    ),
    Diagnosis("decay", f"decay acts on parameters that got no gradient {HOSTILE}", {"share": math.inf}, "likely"),
]


def rich_comparison(**other: Any) -> Comparison:
    return comparison(differences=DIFFERENCES, diagnoses=DIAGNOSES, **other)


def measured(speed: float = 200.0, steps: int = 30, shift: float = 0.0, **other: Any) -> Measured:
    settings: dict[str, Any] = {
        "runs": 3,
        "distances": Distances(1.2e-7, 3.4e-7, 5.6e-6, 2.0),
        "step_seconds": [16 / speed, 15.5 / speed, 16.6 / speed],
        "samples_per_second": speed,
        "peak_memory": [3 * 2**20, 5 * 2**20],
        "trace": trace(curve(steps, shift)),
    }
    settings |= other
    return Measured(**({"repeatable": True if settings["runs"] > 1 else None} | settings))


def failed(stage: str, headline: str = "rank 1 raised RuntimeError: no such op", details: str = "") -> Measured:
    return Measured(failure=Failure(stage, headline, details or f"Traceback (most recent call last):\n  {HOSTILE}\n"))


def suite() -> Report:
    race = measured(repeatable=False, self_comparison=comparison("round-off", a="run 1", b="run 2"))
    far = measured(190.0, distances=Distances(4e-3, 5e-2, 6e-2, 33_000.0), shift=0.4)
    odd = measured(150.0, distances=Distances(math.nan, math.inf, 0.0, math.nan), peak_memory=[])
    rows = [
        Row("one:stage=1,accumulate=2", False, "parity", "nothing more to say", measured(210.0)),
        Row("one:stage=2,offload=optimizer,accumulate=2,precision=bf16", False, "no parity",
            "the loss is 33333 times as far from float64 as the baseline's", far, comparison=rich_comparison()),
        Row("one:stage=3", True, "parity", "not repeatable", race),
        Row("odd", False, "unjudged", "the reference has no loss that is finite", odd),
        Row("nothing", False, "refused", "it trains on no CPU", failed("refused", "trains on no CPU")),
        *(Row(f"fails:{stage}", False, "could not run", f"{stage} went wrong", failed(stage)) for stage in STAGES),
        Row(HOSTILE, False, "could not run", HOSTILE, failed("crash", HOSTILE, HOSTILE)),
        Row("bare", False, "unjudged", "", Measured()),
    ]  # fmt: skip
    side = Side("run", {}, {"torch": "2.13.0", "python": "3.11.7"}, ["all is as installed"],
                baseline=measured(240.0, distances=Distances(1e-7, 3e-7, 4e-6, 1.0)))  # fmt: skip
    settings = {"target": "t5-tiny", "steps": 30, "processes": 2, "factor": 4.0, "seed": None, "device": "cpu"}
    return Report("run", settings, [side], rows, 2, "7 of 13 strategies could not run, and 1 has no parity")


def upgrade() -> Report:
    changed = [
        Difference("configuration", "ZeroConfig.overlap_comm", False, True),
        Difference("configuration", "ZeroConfig.reduce_bucket_size", 500_000_000, None, missing="b"),
        Difference("configuration", HOSTILE, {"x": [1, HOSTILE]}, math.inf),
    ]
    other: dict[str, Any] = {"speed_ratio": 0.98, "speed_spread": 0.05, "memory_ratio": 1.0}
    rows = [
        Row("one:stage=1", False, "same", "identical to the last bit", measured(), measured(196.0),
            comparison("identical"), **other),
        Row("one:stage=1", True, "different", "the losses part in step 5", measured(), measured(196.0, shift=0.3),
            rich_comparison(), changed, **other),
        Row("one:stage=2,accumulate=2", False, "round-off", "no more than the order of additions", measured(),
            measured(120.0), comparison("round-off"), changed[:1], 0.6, 0.05, 1.31),
        Row("one:stage=3,offload=parameters,accumulate=4", False, "different", "the losses part in step 5", measured(),
            measured(196.0, shift=0.3), rich_comparison(parameters=60), changed[:2], **other),
        Row("refuses", False, "refused", "in the same words", failed("refused"), failed("refused")),
        *(Row(f"fails:{stage}", False, "could not run", f"{stage} after", measured(), failed(stage))
          for stage in STAGES),
        Row(HOSTILE, False, "could not run", HOSTILE, failed("crash", HOSTILE), failed("error", HOSTILE)),
        Row("races", False, "different", "the run differs from itself", measured(),
            measured(repeatable=False, self_comparison=comparison("different", a="run 1", b="run 3",
            diagnoses=[Diagnosis("race", "the run differs from itself", {"runs": 3})])), comparison("round-off")),
        Row("empty", False, "different", "no steps", Measured(), Measured(), comparison(steps=0)),
    ]  # fmt: skip
    sides = [
        Side("before", {"lib": "1.2.3"}, {"lib": "1.2.3", "torch": "2.13.0"}, ["shared with what is installed"],
             baseline=measured(240.0)),
        Side("after", {"lib": "1.3.0"}, {"lib": "1.3.0", "torch": "2.13.0", "new": "0.1"}, [HOSTILE],
             baseline=failed("timeout", "no answer in 60 s")),
    ]  # fmt: skip
    settings = {"target": "t5-tiny", "steps": 30, "processes": 2, "accumulate": 1, "device": "cpu", "repeats": 3}
    return Report("upgrade", settings, sides, rows, 2, "different: 4 of 15 strategies differ, and 7 could not run")


def uninstalled() -> Report:
    """Return an upgrade of which one environment could not be made: no rows."""
    failure = Failure("install", "there is no lib 9.9", HOSTILE)
    sides = [Side("before", {"lib": "1.2.3"}, {"lib": "1.2.3"}), Side("after", {"lib": "9.9"}, {}, [], failure)]
    return Report("upgrade", {}, sides, [], 2, "lib 9.9 could not be installed")


def long() -> Comparison:
    """Return a comparison of 10,000 steps and 500 parameters, with losses that aren't finite."""
    steps = 10_000
    found = comparison(steps=steps, parameters=500)
    odd = [math.nan if step % 997 == 0 else math.inf if step % 1009 == 0 else value
           for step, value in enumerate(found.loss_b)]  # fmt: skip
    assert found.gaps is not None
    found.gaps.loss[-1] = math.nan
    found.gaps.parameter_weights[3][7000] = math.inf
    return comparison(steps=steps, gaps=found.gaps, loss_b=odd, first_bit=Parting(3000, "loss", "", 1.0, 1.1, 0.1, 9.0))
