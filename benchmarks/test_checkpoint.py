"""Saving and loading 252 million parameters with AdamW state, beside torch.distributed.checkpoint and the raw library.

Two ranks on one disk, fresh ones for each save and each load; all arms in turn, round after round.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _checkpoints import DISTRIBUTED, RAW, Loaded, Model, Saved, measure, session
from _measure import Quartiles, ratios, replayed, report, tell

pytestmark = replayed

MEMORY = 1.1
"""Of what a rank holds, beside one parameter: the most that a save or load may take."""

MIB = 2**20


@cache
def _rounds(repeats: int, layers: int, folder: str | None) -> dict[str, list[tuple[list[Saved], list[Loaded]]]]:
    builders = {**DISTRIBUTED}
    for strategy, raw in RAW.items():
        builders |= {f"raw {strategy}": raw, strategy: session(strategy)}
    with TemporaryDirectory(dir=folder) as place:
        return measure(builders, Path(place), repeats=repeats, layers=layers)


@cache
def _background(repeats: int, layers: int, folder: str | None) -> dict[str, list[tuple[list[Saved], list[Loaded]]]]:
    builders = {strategy: session(strategy, wait=False) for strategy in RAW}
    with TemporaryDirectory(dir=folder) as place:
        return measure(builders, Path(place), repeats=repeats, layers=layers)


@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize("strategy", RAW)
def test_speed(benchmark, repeats, layers, folder, strategy, what):
    """Seconds of the slower rank, over the faster of the raw library and torch.distributed.checkpoint."""
    rounds = _rounds(repeats, layers, folder)
    place = 0 if what == "save" else 1
    names = [*DISTRIBUTED, f"raw {strategy}", strategy]
    seconds = {name: [max(rank.seconds for rank in one[place]) for one in rounds[name]] for name in names}
    busy = {name: [sum(rank.processor for rank in one[place]) for one in rounds[name]] for name in names}
    *others, own = names
    over = _over_fastest(seconds, own, others)
    over_busy = _over_fastest(busy, own, others)
    report(benchmark, seconds[own], wall=seconds, processor=busy, over_fastest=over, processor_over=over_busy)
    cells = {name.replace(f"raw {strategy}", "raw"): _seconds(seconds[name], busy[name]) for name in others}
    cells |= {"shardkit": _seconds(seconds[own], busy[own]), "over the faster": over.text(".2f")}
    if what == "save":
        saved = [one[0] for one in rounds[strategy]]
        sizes = [ranks[0].size for ranks in saved]
        plain = Quartiles.of([ranks[0].plain / max(rank.seconds for rank in ranks) for ranks in saved])
        cells["MiB/s"] = f"{statistics.median(sizes) / MIB / statistics.median(seconds[own]):.0f}"
        cells["MiB/s of a plain write"] = f"{sizes[0] / MIB / statistics.median(ranks[0].plain for ranks in saved):.0f}"
        cells["of a plain write"] = plain.text(".2f")
    tell(
        f"{what}: seconds (and those of both ranks' processors)",
        strategy=strategy,
        **cells,
        **{"over the faster, processor": over_busy.text(".2f")},
    )


@pytest.mark.parametrize("strategy", RAW)
def test_memory(benchmark, repeats, layers, folder, strategy):
    """What a rank holds more during a save or load, at its most: within 1.1 of its share, and one parameter."""
    rounds = _rounds(repeats, layers, folder)
    largest = max(value.nbytes for value in Model(1).parameters())
    share = max(rank.share for saved, _ in rounds[strategy] for rank in saved)
    saving = [max(rank.extra for rank in saved) for saved, _ in rounds[strategy]]
    loading = [max(rank.extra for rank in loaded) for _, loaded in rounds[strategy]]
    report(benchmark, [0.0] * repeats, saving=saving, loading=loading, share=share)
    raw = rounds[f"raw {strategy}"]
    tell(
        "memory: MiB that the fuller rank holds more, at the most",
        strategy=strategy,
        share=f"{share / MIB:.0f}",
        save=f"{statistics.median(saving) / MIB:.0f}",
        load=f"{statistics.median(loading) / MIB:.0f}",
        of_its_share=f"{max(*saving, *loading) / share:.2f}",
        raw_save=f"{statistics.median(max(rank.extra for rank in saved) for saved, _ in raw) / MIB:.0f}",
        raw_load=f"{statistics.median(max(rank.extra for rank in loaded) for _, loaded in raw) / MIB:.0f}",
    )
    assert max(*saving, *loading) <= MEMORY * share + largest


@pytest.mark.parametrize("strategy", RAW)
def test_in_the_background(benchmark, repeats, layers, folder, strategy):
    """How long training waits for a save in the background, and when it is on the disk if nothing trains."""
    saved = [one[0] for one in _background(repeats, layers, folder)[strategy]]
    waits = [max(rank.seconds for rank in ranks) for ranks in saved]
    finished = [max(rank.finished for rank in ranks) for ranks in saved]
    extra = max(rank.extra for ranks in saved for rank in ranks)
    share = max(rank.share for ranks in saved for rank in ranks)
    report(benchmark, waits, finished=finished, extra=extra, share=share)
    tell(
        "in the background: seconds",
        strategy=strategy,
        training_waits=Quartiles.of(waits).text(".2f"),
        on_the_disk_after=Quartiles.of(finished).text(".2f"),
        waits_of_it=ratios(waits, finished).text(".2f"),
        **{"MiB more": f"{extra / MIB:.0f}", "of its share": f"{extra / share:.2f}"},
    )
    assert extra <= MEMORY * share + max(value.nbytes for value in Model(1).parameters())


def _over_fastest(values: dict[str, list[float]], own: str, others: list[str]) -> Quartiles:
    """Return what an arm takes over that one of the others whose median is the least, round by round."""
    fastest = min(others, key=lambda name: statistics.median(values[name]))
    return ratios(values[own], values[fastest])


def _seconds(wall: list[float], processor: list[float]) -> str:
    return f"{statistics.median(wall):.2f} ({statistics.median(processor):.2f})"
