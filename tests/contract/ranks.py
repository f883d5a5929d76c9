"""Runs the cases on a raw library, on fresh ranks, and says what came of each: right, wrong, error, hang, not offered.

A library may end a process or wait for ever, so that outcomes are written down as they come, and a case that isn't
right is asked once more on ranks of its own.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.errors import LaunchError
from shardkit.testing import run
from tests.cases._table import load_cases
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
            cases[name](RawPrepare(raw, folder / name), rank)
            outcome = {"kind": "right", "text": ""}
        except NotOfferedError as error:
            outcome = {"kind": "not offered", "text": str(error)}
        except pytest.fail.Exception as error:
            outcome = {"kind": "wrong", "text": f"no error ({_first_line(error)})"}
        except AssertionError as error:
            ours = _is_ours(error.__traceback__)
            outcome = {"kind": "wrong", "text": _seen(error)} if ours else _error(error)
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
    last = max((index for index, file in enumerate(files) if "/tests/cases/" in file), default=len(files))
    return last + 1 < len(files) and "/torch/distributed/" in files[last + 1]


def _error(error: BaseException) -> Outcome:
    return {"kind": "error", "text": f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _short(lines[0]) if lines else ""


def _short(text: str, length: int = 220) -> str:
    text = re.sub(r"/\S+/(\S+)", r"\1", text)
    text = re.sub(r"(Connection (closed|reset) by peer).*", r"\1", text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _is_ours(found: TracebackType | None) -> bool:
    """Return whether an assertion is of the case, and not of the library."""
    last = traceback.extract_tb(found)[-1].filename
    return "/tests/" in last or "/torch/testing/" in last


def _seen(error: AssertionError) -> str:
    """Return what a failed assertion saw, and what would have been right."""
    found = error.__traceback__
    line = ""
    while found is not None:
        code = found.tb_frame.f_code
        if "/tests/cases/" in code.co_filename:
            if code.co_name == "assert_close":
                told = _difference(found.tb_frame.f_locals)
                if told:
                    return told
            else:
                line = traceback.extract_tb(found)[0].line or ""
                line += _left_side(line, found.tb_frame)
        found = found.tb_next
    return _short(line.removeprefix("assert ") if line else _first_line(error))


def _left_side(line: str, frame: FrameType) -> str:
    """Return what stood left of a comparison, if it is only names."""
    with contextlib.suppress(Exception):
        tree = ast.parse(line).body[0]
        assert isinstance(tree, ast.Assert)
        assert isinstance(tree.test, ast.Compare)
        left = tree.test.left
        called = {ast.unparse(node.func) for node in ast.walk(left) if isinstance(node, ast.Call)}
        # A call of anything else could be a collective, and the other rank is elsewhere.
        if called <= {"list", "type", "len"}:
            return f" does not hold: {eval(ast.unparse(left), frame.f_globals, frame.f_locals)}"
    return " does not hold"


def _difference(values: dict[str, Any]) -> str:
    actual, expected = values["actual"], values["expected"]
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return f"names {_short(', '.join(actual), 60)}, not {_short(', '.join(expected), 60)}"
        name = values.get("name", "")
        actual, value = actual[name], expected[name]
        told = f"{name}: " if name else ""
    else:
        value, told = expected, ""
    actual, value = torch.as_tensor(actual).detach(), torch.as_tensor(value).detach()
    if actual.shape != value.shape:
        return f"{told}shape {tuple(actual.shape)}, not {tuple(value.shape)}"
    if value.numel() <= 4:
        return f"{told}{_number(actual)}, not {_number(value)}"
    away = (actual.double() - value.double()).abs().max().item()
    return f"{told}{value.numel()} values, away by up to {away:.2g}"


def _number(value: torch.Tensor) -> str:
    numbers = [f"{one:.5g}" for one in value.flatten().tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
