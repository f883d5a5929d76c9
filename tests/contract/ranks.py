"""Runs the cases on a raw library, on fresh ranks, and says what came of each: right, wrong, error, hang, not offered.

A library may end a process or wait for ever, so that outcomes are written down as they come, and a case that isn't
right is asked once more on ranks of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch
import torch.distributed as dist

from shardkit.errors import LaunchError
from shardkit.testing import run
from shardkit.testing._told import Told, first_line, seen
from shardkit.testing.cases._table import load_cases
from tests.contract.raw import RAW, NotOfferedError, RawPrepare

HANG_SECONDS = 20
"""How long a case may take on a rank; every case that ends does so in a few seconds."""

Outcome = dict[str, str]
"""``kind``, of KINDS, and ``text``, which says what was seen."""

KINDS = {
    "right": "right",
    "wrong": "wrong, silently",
    "error": "error on both ranks",
    "partial": "error on one rank",
    "hang": "hang",
    "not offered": "not offered",
}
"""What may come of a case on a raw library, in the words of the page."""


def raw_outcomes(
    library: str, names: list[str], told: Callable[[str, Outcome], None], *, remedy: bool = False
) -> dict[str, Outcome]:
    """Return what comes of each case on a raw library, on two ranks; ``told`` is called as each becomes known.

    At the library's default settings, or with the setting that is its remedy.
    """
    outcomes: dict[str, Outcome] = {}
    waiting = list(names)
    while waiting:
        # In one launch up to the first that may leave the ranks apart.
        together = _launch(library, waiting, remedy)
        for name in list(waiting):
            if name not in together:
                break
            waiting.remove(name)
            outcome = together[name]
            if outcome["kind"] not in ("right", "not offered"):
                outcome = _launch(library, [name], remedy).get(
                    name, {"kind": "error", "text": "the ranks did not start"}
                )
            outcomes[name] = outcome
            told(name, outcome)
        else:
            break
        if not together:
            raise RuntimeError(f"the ranks of {library} do not start")
    return outcomes


def _launch(library: str, names: list[str], remedy: bool) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory(prefix="shardkit-contract-") as folder:
        deaths = {}
        try:
            run(_run_cases, library, remedy, names, Path(folder), processes=2, timeout=60 + 10 * len(names))
        except LaunchError as error:
            deaths[error.rank] = f"{error.traceback or error}".strip().splitlines()[-1]
        ranks = [_read(Path(folder), rank) for rank in (0, 1)]
    found = {}
    for name in names:
        if not any(name in rank for rank in ranks):
            break
        pair = [
            rank.get(name, {"kind": "death", "text": deaths.get(number, "was ended with the other rank")})
            for number, rank in enumerate(ranks)
        ]
        found[name] = _joined(pair)
        if "running" in (pair[0]["kind"], pair[1]["kind"]) or not _together(pair):
            break
    return found


def _read(folder: Path, rank: int) -> dict[str, Outcome]:
    path = folder / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["name"]: line["outcome"] for line in map(json.loads, lines)}


def _joined(pair: list[Outcome]) -> Outcome:
    """Return one outcome of those of two ranks."""
    pair = [{"kind": "death", "text": "was ended"} if one["kind"] == "running" else one for one in pair]
    kinds = [one["kind"] for one in pair]
    if kinds[0] == kinds[1]:
        kind = "error" if kinds[0] == "death" else kinds[0]
    elif "left" in kinds and "hang" not in kinds:
        # The case's own collective, which the other rank never came to: what counts is what the other saw before it.
        rank, seen = next((rank, one) for rank, one in enumerate(pair) if one["kind"] != "left")
        return {**seen, "text": f"rank {rank}: {seen['text']}"}
    elif "hang" in kinds:
        # A rank that saw a wrong value has left the case, and the other may wait for no other reason.
        kind = "wrong" if "wrong" in kinds else "hang"
    elif "error" in kinds or "death" in kinds:
        # A rank that only lost its connection was brought down by the other.
        kind = "partial"
    else:
        kind = "wrong"
    texts = [
        one["text"] or {"hang": "waits without end", "right": "right"}.get(one["kind"], one["kind"]) for one in pair
    ]
    text = texts[0] if texts[0] == texts[1] else "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(texts))
    return {"kind": kind, "text": "" if kind == "right" else text}


def _together(pair: list[Outcome]) -> bool:
    """Return whether the ranks can go on to the next case."""
    return pair[0]["kind"] == pair[1]["kind"] and pair[0]["kind"] in ("right", "not offered", "wrong")


def _run_cases(library: str, remedy: bool, names: list[str], folder: Path) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    cases = load_cases()
    raw = RAW[library].with_remedy() if remedy else RAW[library]
    _start(library)
    path, other = folder / f"rank-{rank}.jsonl", 1 - rank
    linear = torch.nn.functional.linear

    def write(name: str, outcome: Outcome) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"name": name, "outcome": outcome}) + "\n")

    def give_up(name: str) -> None:
        write(name, {"kind": "left" if _in_own_collective() else "hang", "text": ""})
        os._exit(3)

    for name in names:
        write(name, {"kind": "running", "text": ""})
        watchdog = threading.Timer(HANG_SECONDS, give_up, [name])
        watchdog.daemon = True
        watchdog.start()
        try:
            cases[name].run(RawPrepare(raw, folder / name), rank)
            outcome = {"kind": "right", "text": ""}
        except NotOfferedError as error:
            outcome = {"kind": "not offered", "text": str(error)}
        except pytest.fail.Exception as error:
            outcome = {"kind": "wrong", "text": f"no error ({first_line(error)})"}
        except AssertionError as error:
            ours = _is_ours(error.__traceback__)
            outcome = {"kind": "wrong", "text": _differs(seen(error))} if ours else _error(error)
        except Exception as error:
            outcome = _error(error)
        watchdog.cancel()
        torch.nn.functional.linear = linear  # which DeepSpeed's stage 3 replaces, and leaves replaced
        write(name, outcome)
        # In a file and not by a collective: the other rank may wait in one of its own.
        deadline = time.monotonic() + HANG_SECONDS + 10
        while True:
            with contextlib.suppress(ValueError):
                theirs = _read(folder, other).get(name, {"kind": "running"})
                if theirs["kind"] != "running" or time.monotonic() > deadline:
                    break
            time.sleep(0.01)
        if not _together([outcome, theirs]):
            return


def _start(library: str) -> None:
    if library.startswith("DeepSpeed"):
        import deepspeed

        # Compiled at the first start otherwise, and never used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("ERROR")
    dist.init_process_group("gloo")


def _in_own_collective() -> bool:
    """Return whether the main thread stands in a collective that the case itself calls, and not the library."""
    main = threading.main_thread().ident
    assert main is not None
    files = [frame.filename for frame in traceback.extract_stack(sys._current_frames()[main])]
    last = max((index for index, file in enumerate(files) if "/testing/cases/" in file), default=len(files))
    return last + 1 < len(files) and "/torch/distributed/" in files[last + 1]


def _error(error: BaseException) -> Outcome:
    return {"kind": "error", "text": f"{type(error).__name__}: {first_line(error)}".rstrip(": ")}


def _is_ours(found: TracebackType | None) -> bool:
    """Return whether an assertion is of the case, and not of the library."""
    last = traceback.extract_tb(found)[-1].filename
    return "/testing/cases/" in last or "/torch/testing/" in last


def _differs(told: Told) -> str:
    return f"{told.did}, not {told.right}" if told.right else told.did
