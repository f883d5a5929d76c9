"""What a session adds to a step, over the loop written by hand, on a model that computes next to nothing.

One process that waits for nobody: the time is the processor's, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from _loops import BEST, PEERS, Arm, Window, ddp, mixed, plain, ready, session, windows
from _measure import STRATEGIES, Quartiles, differences, interleave, needs_peers, replayed, report, tell
from _workloads import linear

import shardkit

pytestmark = replayed

LIMIT = 5e-6
"""Seconds that a session may add to a micro-step."""

MICROSECOND = 1e-6

WINDOWS = {
    "plain": Window(),
    "accumulate": Window(accumulate=4),
    "clip": Window(max_grad_norm=1.0),
}


def _one(batch: object) -> float:
    return 1.0


# The loop by hand twice: what it differs from itself is the noise.
TORCH_ARMS = [
    Arm("by hand", plain),
    Arm("by hand again", plain),
    Arm("by hand over DDP", ddp(gradient_as_bucket_view=True)),
    Arm("shardkit", session("ddp")),
]
PEER_ARMS = [Arm(name, build) for name, build in PEERS.items()]


# What users of the contract pay: each against the loop by hand that does the same, windows against the plain loop.
CONTRACT = {
    "windows of 1": (Window(), plain, windows("ddp")),
    "windows of 4": (Window(accumulate=4), plain, windows("ddp")),
    "windows of 4 with weights": (Window(accumulate=4), plain, windows("ddp", weight=_one)),
    "bf16": (Window(precision="bf16"), mixed, session("ddp")),
    "fp16": (Window(precision="fp16"), mixed, session("ddp")),
    "fp16, clipped": (Window(precision="fp16", max_grad_norm=1.0), mixed, session("ddp")),
}


def _names(arms: list[Arm]) -> list[str]:
    return [arm.name for arm in arms]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "arm",
    [
        *_names(TORCH_ARMS),
        *(pytest.param(arm.name, marks=needs_peers) for arm in PEER_ARMS),
    ],
)
def test_session_over_torch(benchmark, window, arm):
    """One process on torch alone, beside accelerate and lightning-fabric."""
    seconds = _torch_blocks(window)
    added = differences(seconds[arm], seconds["by hand"])
    report(benchmark, seconds[arm], added_seconds=added)
    tell(
        f"µs per micro-step: torch, {window}",
        arm=arm,
        step=_microseconds(Quartiles.of(seconds[arm])),
        fastest=f"{min(seconds[arm]) / MICROSECOND:.1f}",
        added_to_by_hand=_microseconds(added),
    )
    if arm == "shardkit":
        _assert_within(added)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy != "ddp"])
def test_session_over_library(benchmark, window, strategy):
    """One process on a sharding library, over the library's own loop."""
    if strategy not in BEST:
        pytest.fail(f"no loop by hand is written for strategy {strategy!r}: add it to _loops.BEST")
    arms = [
        Arm("by hand", BEST[strategy]),
        Arm("by hand again", BEST[strategy]),
        Arm("shardkit", session(strategy)),
    ]
    seconds = _measure(arms, WINDOWS[window], length=10)
    added = differences(seconds["shardkit"], seconds["by hand"])
    noise = differences(seconds["by hand again"], seconds["by hand"])
    report(benchmark, seconds["shardkit"], added_seconds=added, noise_seconds=noise)
    tell(
        f"µs per micro-step: libraries, {window}",
        strategy=strategy,
        by_hand=_microseconds(Quartiles.of(seconds["by hand"])),
        shardkit=_microseconds(Quartiles.of(seconds["shardkit"])),
        added_to_by_hand=_microseconds(added),
        noise=_microseconds(noise),
    )
    _assert_within(added)


@pytest.mark.parametrize("name", CONTRACT)
def test_what_the_contract_costs_those_who_use_it(benchmark, name):
    """Windows, weights and low precision, over the loops by hand that do the same or, for windows, the plain one."""
    window, by_hand, ours = CONTRACT[name]
    arms = [Arm("by hand", by_hand), Arm("by hand again", by_hand), Arm("shardkit", ours)]
    seconds = _measure(arms, window, length=100)
    added = differences(seconds["shardkit"], seconds["by hand"])
    noise = differences(seconds["by hand again"], seconds["by hand"])
    report(benchmark, seconds["shardkit"], added_seconds=added, noise_seconds=noise)
    tell(
        "µs per micro-step: the contract, on torch",
        what=name,
        by_hand=_microseconds(Quartiles.of(seconds["by hand"])),
        shardkit=_microseconds(Quartiles.of(seconds["shardkit"])),
        added_to_by_hand=_microseconds(added),
        noise=_microseconds(noise),
    )


@cache
def _torch_blocks(window: str) -> dict[str, list[float]]:
    arms = TORCH_ARMS if needs_peers.args[0] else [*TORCH_ARMS, *PEER_ARMS]
    return _measure(arms, WINDOWS[window], length=100)


def _measure(arms: list[Arm], window: Window, *, length: int) -> dict[str, list[float]]:
    return shardkit.launch(_blocks, arms, window, 60, length, processes=1, timeout=600)[0]


def _blocks(arms: list[Arm], window: Window, blocks: int, length: int) -> dict[str, list[float]]:
    """Return seconds per micro-step of each arm in each round. Runs in a process of its own."""
    torch.distributed.init_process_group("gloo")
    steps, before = ready(arms, linear, window, 4)
    return interleave(steps, blocks=blocks, length=length, before=before, clock=time.process_time)


def _assert_within(added: Quartiles) -> None:
    assert added.median <= LIMIT, f"a session adds {_microseconds(added)} µs to a micro-step"


def _microseconds(figure: Quartiles) -> str:
    return figure.text(".1f", unit=MICROSECOND)
