"""A disk that is full or fails at any moment of a save: the same error on all ranks, and what was there stays."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoints import _write, checkpoints, latest
from shardkit.errors import CheckpointError
from shardkit.testing import run
from shardkit.testing.cases._models import train
from tests.checkpoints._moments import Fate, Record, watched


def opened(strategy: str = "ddp", width: int = 16) -> shardkit.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardkit.prepare(model, optimizer, shardkit.Strategy.parse(strategy))


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_everywhere(strategy: str, folder: Path, everywhere: bool) -> list[str]:
    """Have operations of each rank fail in turn, the first, a middle and the last of each kind or all of them.

    Returns what this rank raised.
    """
    failing = ["before open", "before create", "before pwrite", "within pwrite", "after pwrite"]
    failing += ["before fsync", "after fsync", "before mkdir", "before rename", "before unlink", "before rmdir"]
    with opened(strategy) as session:
        train(session, 1)
        session.save(folder)
        record = Record()
        with watched(record):
            session.save(folder)
        own = []
        for moment in failing:
            count = record.moments.count(moment)
            numbers = {*range(count)} if everywhere else {0, count // 2, count - 1} & {*range(count)}
            own += [(moment, number) for number in sorted(numbers)]
        planned = [[(rank, *each) for each in found] for rank, found in enumerate(session._processes.agree(own))]
        told, missed = [], []
        for number, (rank, moment, before) in enumerate(itertools.chain(*planned)):
            wait = number % 3 != 0
            previous, steps = latest(folder), session.steps
            train(session, 1, first=session.steps)
            with watched(Fate(moment, before, "", full) if rank == session.rank else Record()):
                try:
                    session.save(folder, wait=wait)
                    session._keeper.finish()
                except CheckpointError as error:
                    told.append(f"{moment} {before} on rank {rank}: {error}")
                else:
                    missed.append(f"{moment} {before} on rank {rank}")
            session.full_weights()
            if missed or " is saved, but " in told[-1]:
                # Only the end of the one before went wrong.
                assert latest(folder) != previous, told[-1]
                previous, steps = latest(folder), session.steps
            else:
                assert checkpoints(folder) == [previous], told[-1]
            assert not list(folder.glob(".partial-*")), told[-1]
            session.load(folder)
            assert session.steps == steps
            session.save(folder)
            assert len(list(folder.glob("*"))) == 2, "leftovers are cleaned by the next save"
            # What couldn't be removed goes the next time, and to make a directory that is there matters to nobody.
            assert all(re.match("before (open|unlink|rmdir|mkdir 0)", each) for each in missed), missed
            missed.clear()
    return told


def stays(strategy: str, folder: Path, everywhere: bool) -> None:
    first, second = run(fails_everywhere, strategy, folder, everywhere, timeout=400)
    assert first == second
    assert len(first) > 20
    for told in first:
        assert re.search(rf"rank \d: .*'{folder}[^']*'.*No space left on device", told), told


def test_whatever_operation_fails_on_whichever_rank_the_old_checkpoint_stays(tmp_path: Path) -> None:
    stays("ddp", tmp_path / "c", everywhere=False)


@pytest.mark.slow
def test_the_old_checkpoint_stays_at_all_moments_under_each_strategy(strategy: str, tmp_path: Path) -> None:
    stays(strategy, tmp_path / "c", everywhere=True)


@contextmanager
def file_size(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def too_large(folder: Path, rank: int) -> str:
    """Return what a save raises where a rank may write no file above 3000 bytes."""
    with opened(width=200) as session:
        before = session.save(folder)
        train(session, 1)
        with (
            file_size(3000 if session.rank == rank else resource.RLIM_INFINITY),
            pytest.raises(CheckpointError) as error,
        ):
            session.save(folder)
        assert list(folder.glob("[!.]*")) == [before]
        session.load(folder)
        assert session.steps == 0
        train(session, 1)
        session.save(folder)
    return str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_limit_on_the_size_of_files_is_named_with_the_file(tmp_path: Path, rank: int) -> None:
    first, second = run(too_large, tmp_path / "c", rank)
    assert first == second
    assert re.match(rf"rank {rank}: can't write '{tmp_path}/c/.partial-\w+/.*safetensors': File too large", first)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fills(folder: Path, look_first: bool) -> str:
    """Return what a save raises that doesn't fit any more beside the one before."""
    if not look_first:
        _write._free = lambda path: None
    with opened(width=250) as session:
        before = session.save(folder)
        train(session, 1)
        with pytest.raises(CheckpointError) as error:
            session.save(folder, state={"more": torch.ones(60_000)})
        session.full_weights()
        assert list(folder.glob("[!.]*")) == [before]
        assert not list(folder.glob(".partial*"))
        session.load(folder)
        assert session.steps == 0
        train(session, 1)
        session.save(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("look_first", "words"),
    [
        (True, r"rank 0: the disk of '.*/disk' is too full: the checkpoint needs \d+ bytes, and \d+ are free"),
        (False, r"rank \d: can't write '.*/disk/.partial-\w+/.*': No space left on device"),
    ],
)
def test_a_full_disk_is_named_on_both_ranks(small_disk: Path, look_first: bool, words: str) -> None:
    first, second = run(fills, small_disk, look_first)
    assert first == second
    assert re.match(words, first)


def test_a_disk_mounted_read_only_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with opened() as session, pytest.raises(CheckpointError, match=f"can't write '{small_disk}.*Read-only file system"):
        session.save(small_disk)
