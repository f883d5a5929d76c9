"""What DistributedDataParallel's own settings cost and save, by hand: where the defaults of the plugin come from."""

from __future__ import annotations

from typing import Any

import pytest
from _loops import Arm, ddp
from _measure import Quartiles, ratios, replayed, report, tell
from _ranks import measure_blocks, measure_peaks

pytestmark = replayed

WORKLOAD, BATCH, BLOCKS = "t5-small", 4, 7

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "defaults again": {},
    "view": {"gradient_as_bucket_view": True},
    "view, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "view, find unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "view, bucket 1 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "view, bucket 5 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 5},
    "view, bucket 100 MiB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100},
}
ARMS = tuple(Arm(name, ddp(**settings)) for name, settings in SETTINGS.items())


@pytest.fixture(scope="module")
def measured(repeats: int) -> tuple[dict[int, dict[str, list[Any]]], dict[str, list[float]]]:
    """Peaks of all settings by batch size, and seconds per step."""
    peaks = {batch: measure_peaks(ARMS, WORKLOAD, batch, repeats=repeats) for batch in (1, BATCH)}
    return peaks, measure_blocks(list(ARMS), WORKLOAD, BATCH, blocks=BLOCKS, length=1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_ddp_settings(benchmark, measured, settings):
    """Peak of memory and speed over the library's defaults."""
    peaks, seconds = measured
    bytes_held = {batch: [peak for peak, _ in of[settings]] for batch, of in peaks.items()}
    speed = ratios(seconds["defaults"], seconds[settings])
    report(benchmark, seconds[settings], peaks_bytes=bytes_held, speed_over_defaults=speed)
    held = {f"MiB, batch {batch}": f"{Quartiles.of(values).median / 2**20:.0f}" for batch, values in bytes_held.items()}
    tell(f"settings of DDP by hand: {WORKLOAD}, 2 ranks", settings=settings, **held, speed_over_defaults=speed.text())
