"""Training by hand over each library, as its users write it, with its own checkpoint in the midst."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit

ROWS = 12
BEFORE, AFTER = 2, 2


class Odd(nn.Module):
    """Two groups' worth of odd sizes: tied, frozen and never used parameters, and a buffer; with ``number`` one of no
    dimension, too."""

    def __init__(self, number: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 7)
        self.out = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.out.weight
        self.scale = nn.Parameter(torch.tensor(1.5 if number else [1.5]))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.norm = nn.LayerNorm(7)
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.randn(7))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm((self.inp(rows) + self.shift).to(self.norm.weight.dtype)))
        return self.out(hidden) * self.scale + self.tied(hidden).square() + self.frozen


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of settings of their own, not in the model's order."""
    wide = [value for value in model.parameters() if value.dim() > 1]
    rest = [value for value in model.parameters() if value.dim() <= 1]
    return [{"params": wide[::-1], "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.01, momentum=0.9)


def part(index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return this rank's rows of a step: all ranks together have the same at any number of them."""
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(index))
    rank, size = dist.get_rank(), dist.get_world_size()
    return rows.chunk(size)[rank].to(dtype)


def loss_of(model: Any, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(part(index, dtype)).float().square().mean()


Result = tuple[list[float], dict[str, Tensor]]
"""The losses of this rank after the checkpoint, and the weights at the end."""


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in model.named_parameters()}


def deepspeed(
    folder: Path, cases: list[tuple[int, str, bool]], settings: dict[str, Any] | None = None
) -> dict[tuple[int, str, bool], Result]:
    """Train with each stage and optimizer, in half precision or not, and save after two of four steps."""
    import deepspeed

    warnings.simplefilter("ignore")
    found = {}
    for stage, optimizer, half in cases:
        model, dtype = Odd(), torch.bfloat16 if half else torch.float32
        config = {
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size() if dist.is_initialized() else 1,
            "zero_optimization": {"stage": stage, **(settings or {})},
            "zero_allow_untested_optimizer": True,
            # Its own default is 1.
            "gradient_clipping": 0.0,
            "bf16": {"enabled": half},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=globals()[optimizer](model), config=config)
        losses = []
        for index in range(BEFORE + AFTER):
            if index == BEFORE:
                engine.save_checkpoint(str(folder / name_of(stage, optimizer, half)), client_state={"epoch": 7})
            loss = loss_of(engine, index, dtype)
            engine.backward(loss)
            engine.step()
            # As a schedule of the user's own does.
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5
            losses.append(loss.item())
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            weights = plain_weights(model)
        found[stage, optimizer, half] = losses[BEFORE:], weights
        engine.destroy()
    return found


def name_of(stage: int, optimizer: str, half: bool) -> str:
    return f"stage-{stage}-{optimizer}{'-half' if half else ''}"


def fairscale(folder: Path) -> Result:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    warnings.simplefilter("ignore")
    _group()
    module = Odd(number=True)
    optimizer = OSS(groups(module), optim=torch.optim.AdamW, lr=0.01)
    model = ShardedDataParallel(module, optimizer, reduce_buffer_size=0)

    def save() -> None:
        optimizer.consolidate_state_dict(recipient_rank=0)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "fairscale.pt")

    return _train(module, model, optimizer, save)


def ddp(folder: Path) -> Result:
    """Train with DistributedDataParallel and write a file of torch.save and a folder of distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    warnings.simplefilter("ignore")
    _group()
    module = Odd(number=True)
    optimizer = torch.optim.AdamW(groups(module), lr=0.01)
    model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)

    def save() -> None:
        if dist.get_rank() == 0:
            torch.save(
                {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 7},
                folder / "ddp.pt",
            )
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "epoch": 7}, checkpoint_id=folder / "dcp")
        flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": flat[0], "optim": flat[1]}, checkpoint_id=folder / "dcp-flat")
        both = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(both, checkpoint_id=folder / "dcp-numbers")

    return _train(module, model, optimizer, save)


def zero(folder: Path) -> Result:
    """Train with ZeroRedundancyOptimizer under DistributedDataParallel, whose state one rank collects and saves."""
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _group()
    module = Odd(number=True)
    optimizer = ZeroRedundancyOptimizer(groups(module), torch.optim.AdamW, lr=0.01)
    model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)

    def save() -> None:
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "zero.pt")

    return _train(module, model, optimizer, save)


class Chain(nn.Module):
    """Layers of distinct sizes, with nothing that fully_shard doesn't take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(8, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(rows)))))


def fsdp(folder: Path) -> Result:
    """Train with fully_shard, and write a folder that has each parameter in parts and a file that has them whole."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    _group()
    model = Chain()
    fully_shard(model)
    optimizer = adamw(model)

    def save() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp")
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": state}, folder / "fsdp.pt")

    losses, _ = _train(model, model, optimizer, save)
    return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}  # type: ignore[operator]


def _group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _train(module: nn.Module, model: Any, optimizer: Any, save: Any) -> Result:
    losses = []
    for index in range(BEFORE + AFTER):
        if index == BEFORE:
            save()
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        losses.append(loss.item())
    return losses[BEFORE:], plain_weights(module)


def resumed(wanted: list[tuple[str, str, str, str, bool]]) -> list[Result]:
    """Go on from checkpoints: of a folder, under a strategy, with a model, an optimizer, and in half precision."""
    warnings.simplefilter("ignore")
    found = []
    for folder, strategy, model_name, optimizer_name, half in wanted:
        model = {"Odd": lambda: Odd(), "Odd with a number": lambda: Odd(number=True), "Chain": Chain}[model_name]()
        # Other weights and settings than those of the checkpoint, which must bring its own.
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        optimizer = globals()[optimizer_name](model)
        for group in optimizer.param_groups:
            group["lr"] = 5.0
        asked: Any = strategy
        if half:
            name, _, options = strategy.partition(":")
            pairs = dict(pair.split("=") for pair in options.split(","))
            asked = shardkit.Strategy(name, precision="bf16", options={"half_weights": True, **pairs})
        losses = []
        with shardkit.prepare(model, optimizer, asked) as session:
            session.load(folder)
            assert session.steps == BEFORE
            for index in range(BEFORE, BEFORE + AFTER):
                loss = loss_of(session.model, index)
                session.backward(loss)
                assert session.step()
                for group in session.optimizer.param_groups:
                    group["lr"] *= 0.5
                losses.append(loss.item())
            weights = session.full_weights()
        if half:
            # As the library's own module has them.
            weights = {name: value.bfloat16() for name, value in weights.items()}
        names = [name for name, _ in model.named_parameters()]
        found.append((losses, copy.deepcopy({name: weights[name] for name in names})))
    return found
