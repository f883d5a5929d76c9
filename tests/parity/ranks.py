"""Many cells in one launch of fresh ranks, and a trace of each from every rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import shardkit
from shardkit import Strategy, testing
from shardkit.errors import LaunchError

from .cells import STEPS, Cell, Trace

CELL_SECONDS = 60
"""How long a cell may take before its rank says where it hangs, and ends: the others lose it, and end as well."""

LAUNCHES = 3
"""How often the remaining cells are launched again after one took its ranks down."""


@dataclass(frozen=True)
class Failure:
    """What happened instead of a trace."""

    text: str


def record(
    strategy: str, world_size: int, cells: Sequence[Cell], prelude: Callable[[], None] | None = None
) -> dict[Cell, list[Trace] | Failure]:
    """Train the cells one after the other on the same fresh ranks; return each rank's trace of each cell.

    A cell that fails doesn't keep the others from running: if it took its ranks down, they are launched again.
    ``prelude`` is called on each rank first.
    """
    found: dict[Cell, list[Trace] | Failure] = {}
    for _ in range(LAUNCHES):
        remaining = [cell for cell in cells if cell not in found]
        if not remaining:
            break
        # A world of one keeps one core busy: two such worlds share the cells.
        shares = [share for share in (remaining[::2], remaining[1::2]) if share] if world_size == 1 else [remaining]
        with ThreadPoolExecutor(len(shares)) as pool:
            for part in pool.map(lambda share: _launch(strategy, world_size, share, prelude), shares):
                found |= part
    lost = Failure(f"not run: {LAUNCHES} launches of {strategy!r} on {world_size} ranks broke down before this cell")
    return {cell: found.get(cell, lost) for cell in cells}


def train(
    strategy: str,
    cell: Cell,
    *,
    steps: int = STEPS,
    watch: bool = True,
    evaluate: bool = False,
) -> Trace:
    """Train a cell on this rank, through a session.

    With ``watch`` it is asked for norms and gradients in each step, with ``evaluate`` for a loss on whole weights at
    the end; without them for nothing but the weights.
    """
    workload, rank, world_size = cell.workload, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Other weights on each rank: training starts from those of rank 0.
    module = workload.build(rank)
    asked = replace(
        Strategy.parse(strategy), accumulate=cell.accumulate, max_grad_norm=cell.max_grad_norm, track_grad_norm=watch
    )
    trace = Trace([], [], [], {}, [])
    with shardkit.prepare(module, cell.build_optimizer(module), asked) as session:
        for step in range(steps):
            trace.losses.append([])
            for micro in range(cell.accumulate):
                batch = workload.part(step, rank, world_size, micro, cell.accumulate)
                loss = workload.loss(session.model, batch)
                session.backward(loss)
                trace.losses[-1].append(loss.item())
                last = micro + 1 == cell.accumulate
                if last and watch:
                    trace.gradients.append(session.full_gradients())
                moved = session.step()
                assert moved is last, f"step {step}, micro-batch {micro}: session.step() returned {moved}"
            if watch:
                trace.grad_norms.append(session.grad_norm)
        if evaluate:
            with session.evaluate() as whole:
                trace.evaluations.append(workload.loss(whole, workload.part(0, rank, world_size, 0, 1)).item())
        trace.weights.update(session.full_weights())
    return trace


def _launch(
    strategy: str, world_size: int, cells: list[Cell], prelude: Callable[[], None] | None
) -> dict[Cell, list[Trace] | Failure]:
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder, broke = Path(name), None
        try:
            testing.run(
                _train_all, strategy, cells, folder, prelude, processes=world_size, timeout=CELL_SECONDS * len(cells)
            )
        except LaunchError as error:
            broke = str(error)
        found: dict[Cell, list[Trace] | Failure] = {}
        for index, cell in enumerate(cells):
            files = [_file(folder, index, rank) for rank in range(world_size)]
            told = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
            errors = [f"rank {rank}: {one.text}" for rank, one in enumerate(told) if isinstance(one, Failure)]
            if broke is not None and len(told) < world_size:
                stacks = [file.read_text() for file in sorted(folder.glob("stack-*"))]
                found[cell] = Failure("\n".join([broke, *errors, *stacks]))
                break
            found[cell] = Failure("\n".join(errors)) if errors else told
        return found


def _train_all(strategy: str, cells: list[Cell], folder: Path, prelude: Callable[[], None] | None) -> None:
    rank = int(os.environ["RANK"])
    if prelude is not None:
        prelude()
    with open(folder / f"stack-{rank}", "w") as stack:
        for index, cell in enumerate(cells):
            # A hang inside a collective ends by no exception: only the process can.
            faulthandler.dump_traceback_later(CELL_SECONDS, exit=True, file=stack)
            outcome: Trace | Failure
            try:
                outcome = train(strategy, cell)
            except Exception:
                # The session has left the process group, so the next cell meets the other ranks in a new one.
                outcome = Failure(traceback.format_exc())
            # A library that collects garbage at each start need not walk through what earlier cells left to keep.
            gc.collect()
            gc.freeze()
            draft = folder / f"draft-{rank}"
            draft.write_bytes(pickle.dumps(outcome))
            draft.rename(_file(folder, index, rank))
        faulthandler.cancel_dump_traceback_later()


def _file(folder: Path, index: int, rank: int) -> Path:
    return folder / f"cell-{index}-rank-{rank}"
