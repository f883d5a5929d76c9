"""The whole move of docs/leaving-fairscale.md, on a smaller model: each step goes on from FairScale's own numbers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardkit import Strategy, testing
from shardkit.checkpoints import import_checkpoint
from shardkit.errors import ShardkitError
from tests.docs._blocks import ROOT

EXAMPLES = ROOT / "docs/examples/leaving-fairscale"
NEW = ("fairscale", "fsdp", "fairscale:shard=optimizer", "zero", "deepspeed:stage=2")
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each."""


def _programs(*names: str) -> list[Any]:
    """Import programs of the page, in this process, with a model of a few thousand parameters."""
    sys.path.insert(0, str(EXAMPLES))
    import task  # type: ignore[import-not-found]

    task.build.__defaults__ = (16, 1)
    return [task, *(__import__(name) for name in names)]


def _printed(train: Callable[..., None], *args: Any, **settings: Any) -> Steps:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        train(*args, **settings)
    return [(float(loss), float(norm)) for loss, norm in re.findall(r"loss (\S+)  norm (\S+)", told.getvalue())]


def _moved(folder: Path) -> dict[str, Steps]:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    task, before, after, alone = _programs("before", "after", "alone")
    dist.init_process_group("gloo")
    found = {"new": _printed(after.train, Strategy("fairscale"), contextlib.nullcontext, 3, resume=None)}
    found["old"] = _printed(before.train, 3, save="job.pt")
    found["old, by its optimizer's zero_grad"] = _printed(before.train, 3, through="optimizer")
    found["old goes on"] = _printed(before.train, 3, resume="job.pt")
    if dist.get_rank() == 0:
        work = task.workload(width=16, layers=1)
        import_checkpoint("job.pt", "checkpoints", model=work.model, optimizer=work.optimizer)
    dist.barrier()
    for text in NEW:
        found[text] = _printed(after.train, Strategy.parse(text), contextlib.nullcontext, 3)
    for library in ("zero", "fsdp"):
        found[f"torch's {library}"] = _printed(alone.train, library, "job.pt", 3)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("move")


@pytest.fixture(scope="module")
def moved(folder: Path) -> dict[str, Steps]:
    for library in ("fairscale", "deepspeed", "transformers"):
        pytest.importorskip(library)
    found: dict[str, Steps] = testing.run(_moved, folder, processes=2, timeout=120)[0]
    assert {len(steps) for steps in found.values()} == {3}
    return found


def assert_same(steps: Steps, expected: Steps) -> None:
    """Losses to what is printed of them; norms to the float32 round-off of OSS, which adds up their squares."""
    for (loss, norm), (other_loss, other_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=5e-7)
        assert norm == pytest.approx(other_norm, rel=1e-5)


def test_the_loop_over_shardkit_does_what_the_old_one_does(moved: dict[str, Steps]) -> None:
    assert_same(moved["new"], moved["old"])


@pytest.mark.parametrize("how", [*NEW, "torch's zero", "torch's fsdp"])
def test_every_way_goes_on_from_the_old_checkpoint_as_the_old_job_does(moved: dict[str, Steps], how: str) -> None:
    assert_same(moved[how], moved["old goes on"])


def test_the_old_job_goes_wrong_from_the_second_step_if_its_optimizer_drops_gradients(moved: dict[str, Steps]) -> None:
    right, wrong = moved["old"], moved["old, by its optimizer's zero_grad"]
    assert wrong[0] == right[0]
    assert wrong[1][1] != pytest.approx(right[1][1], rel=1e-2)


def _without_fairscale(folder: Path) -> tuple[list[Steps], str]:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    sys.modules["fairscale"] = None  # type: ignore[assignment]
    _, after = _programs("after")
    steps = [_printed(after.train, Strategy(name), contextlib.nullcontext, 3) for name in ("fsdp", "zero")]
    with pytest.raises(ShardkitError) as raised:
        after.train(Strategy("fairscale"), contextlib.nullcontext)
    return steps, str(raised.value)


def test_nothing_of_it_needs_fairscale(moved: dict[str, Steps], folder: Path) -> None:
    steps, told = testing.run(_without_fairscale, folder, processes=2, timeout=60)[0]
    for one in steps:
        assert_same(one, moved["old goes on"])
    assert 'pip install "shardkit[fairscale]"' in told
