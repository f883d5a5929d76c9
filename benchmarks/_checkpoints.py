"""Checkpoints that are compared: of torch.distributed.checkpoint, of a raw library, and of shardkit. Two ranks, gloo.

Each arm takes a model and its optimizer, and says how it trains a step, saves and loads.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _memory import fix_allocator, peak, start_peak
from torch import Tensor, nn

import shardkit
from shardkit.testing import preload, run

preload("fairscale.nn", "deepspeed", "torch.distributed.checkpoint", "torch.distributed.fsdp")

WIDTH, LAYERS, VOCABULARY = 1024, 26, 32_768
"""252 million parameters, the largest of 33.5 million."""

_PIECE = 2**23


class Model(nn.Module):
    """An embedding under a stack of layers: large and small parameters, and next to no computation."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.square().mean()


class Arm(NamedTuple):
    """How one library keeps a checkpoint. ``finish`` waits for a save in the background."""

    step: Callable[[], None]
    save: Callable[[Path], Any]
    load: Callable[[Path], Any]
    finish: Callable[[], None] = lambda: None
    share: Callable[[], int] = lambda: 0
    """The bytes of weights and optimizer state that this rank holds."""


Builder = Callable[[nn.Module, torch.optim.Optimizer], Arm]


class Saved(NamedTuple):
    """What a rank measured of a save."""

    seconds: float
    """Until the call returned."""
    finished: float
    """Until the checkpoint was on the disk."""
    processor: float
    """Seconds of the processor that this rank took until then, which what else runs on the machine changes little."""
    extra: int
    """The most that was resident above what it held before, in bytes."""
    share: int
    plain: float
    """Seconds of a plain sequential write of as many bytes, with fsync, by one process."""
    size: int
    """The bytes of the checkpoint."""


class Loaded(NamedTuple):
    """What a rank measured of a load into a fresh model, whose optimizer has no state yet."""

    seconds: float
    processor: float
    extra: int


def session(strategy: str, *, wait: bool = True) -> Builder:
    """Return the builder of a shardkit session, which saves at once or in the background."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
        prepared = shardkit.prepare(model, optimizer, strategy)

        def step() -> None:
            prepared.backward(prepared.model(_tokens()))
            prepared.step()

        def share() -> int:
            engine = prepared._engine
            held = [shard.values for shard in engine.weight_shards()]
            held += [value for state in engine.stepper.state.values() for value in state.values()]
            return sum({value.data_ptr(): value.nbytes for value in held}.values())

        # Finished: the next save or load waits for the one before.
        return Arm(
            step,
            lambda folder: prepared.save(folder, wait=wait),
            prepared.load,
            prepared._keeper.finish,
            share,
        )

    return build


def distributed_checkpoint(*, sharded: bool) -> Builder:
    """Return the builder of torch.distributed.checkpoint, over DistributedDataParallel or fully_shard (FSDP2)."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = type(optimizer)(model.parameters(), fused=True)
        else:
            model = nn.parallel.DistributedDataParallel(model)

        def state() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        def load(folder: Path) -> None:
            held = state()
            dcp.load(held, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])

        # It gives an optimizer without state its own, by a step with gradients of zero.
        return Arm(lambda: state() and None, lambda folder: dcp.save(state(), checkpoint_id=folder), load)

    return build


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
    """Build the loop over DistributedDataParallel whose rank 0 writes by torch.save."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        wrapped(_tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        _synchronize(folder)

    def load(folder: Path) -> None:
        held = torch.load(folder / "checkpoint.pt")
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])

    return Arm(step, save, load)


def fairscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
    """Build the loop over FairScale's OSS and ShardedDDP, which consolidates the state on rank 0."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    sharded = OSS(model.parameters(), optim=type(optimizer), lr=1e-4, fused=True)
    wrapped = ShardedDataParallel(model, sharded, reduce_buffer_size=0)

    def step() -> None:
        wrapped(_tokens()).backward()
        sharded.step()
        wrapped.zero_grad(set_to_none=True)

    def save(folder: Path) -> None:
        sharded.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            folder.mkdir()
            torch.save({"model": model.state_dict(), "optimizer": sharded.state_dict()}, folder / "checkpoint.pt")
        _synchronize(folder)

    def load(folder: Path) -> None:
        held = torch.load(folder / "checkpoint.pt", weights_only=False)
        model.load_state_dict(held["model"])
        sharded.load_state_dict(held["optimizer"])

    return Arm(step, save, load)


def deepspeed(stage: int) -> Builder:
    """Return the builder of DeepSpeed's own save_checkpoint and load_checkpoint."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
        import deepspeed as library

        # Never used here, and compiled at the first start otherwise.
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        library.utils.logger.setLevel("ERROR")
        bucket = 50_000_000
        settings = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**settings, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)

        def step() -> None:
            engine.backward(engine(_tokens()))
            engine.step()

        def save(folder: Path) -> None:
            engine.save_checkpoint(str(folder))
            _synchronize(folder)

        return Arm(step, save, lambda folder: engine.load_checkpoint(str(folder)))

    return build


RAW: dict[str, Builder] = {
    "ddp": ddp,
    "deepspeed:stage=3": deepspeed(3),
    "fairscale": fairscale,
    "deepspeed:stage=1": deepspeed(1),
    "deepspeed:stage=2": deepspeed(2),
}

DISTRIBUTED: dict[str, Builder] = {
    "torch.distributed.checkpoint, DDP": distributed_checkpoint(sharded=False),
    "torch.distributed.checkpoint, FSDP2": distributed_checkpoint(sharded=True),
}


def measure(
    builders: dict[str, Builder], folder: Path, *, repeats: int, layers: int = LAYERS, warm: bool = False
) -> dict[str, list[tuple[list[Saved], list[Loaded]]]]:
    """Return what the ranks measured of each arm: one save and one load of each, arm after arm, again and again.

    A load reads from the disk, unless ``warm``: then from the system's memory of it.
    """
    found: dict[str, list[tuple[list[Saved], list[Loaded]]]] = {name: [] for name in builders}
    for _ in range(repeats):
        for name, build in builders.items():
            place = folder / "checkpoint"
            try:
                saved = run(_save, build, place, layers, processes=2, timeout=300)
                _forget(place, warm)
                loaded = run(_load, build, place, layers, processes=2, timeout=300)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            found[name].append((saved, loaded))
            print(f"{name}: {saved} {loaded}", flush=True)
    return found


def _save(build: Builder, folder: Path, layers: int) -> Saved:
    arm = _built(build, layers)
    arm.step()
    dist.barrier()
    held, busy = start_peak(), time.process_time()
    start = time.perf_counter()
    arm.save(folder)
    dist.barrier()
    seconds = time.perf_counter() - start
    arm.finish()
    dist.barrier()
    finished, busy = time.perf_counter() - start, time.process_time() - busy
    extra = peak() - held
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    plain = _plain_write(folder.parent / "plain", size) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return Saved(seconds, finished, busy, extra, arm.share(), plain, size)


def _load(build: Builder, folder: Path, layers: int) -> Loaded:
    arm = _built(build, layers)
    dist.barrier()
    held, busy = start_peak(), time.process_time()
    start = time.perf_counter()
    arm.load(folder)
    dist.barrier()
    return Loaded(time.perf_counter() - start, time.process_time() - busy, peak() - held)


def _built(build: Builder, layers: int) -> Arm:
    warnings.simplefilter("ignore")
    fix_allocator()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(layers)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            # Without temporary copies: they would leave memory behind that is no longer new to the process.
            value.uniform_(-0.01, 0.01)
    return build(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def _tokens() -> Tensor:
    return torch.arange(4)


def _synchronize(folder: Path) -> None:
    """Have all files on the disk, as shardkit and torch.distributed.checkpoint do, each rank its part of them."""
    dist.barrier()
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    dist.barrier()


def _plain_write(path: Path, size: int) -> float:
    piece = os.urandom(_PIECE)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for first in range(0, size, _PIECE):
            file.write(memoryview(piece)[: min(_PIECE, size - first)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _forget(folder: Path, warm: bool) -> None:
    """Drop what the system remembers of the files, or read them once."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                if not warm:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while warm and opened.read(_PIECE):
                    pass
