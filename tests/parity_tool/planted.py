"""The runs that the tests of the comparison read, by name; each is compared with the run that it is of."""

from __future__ import annotations

from dataclasses import replace

from .runs import Run

PLAIN = {
    "sgd": Run(),
    "momentum": Run(optimizer="momentum"),
    "adamw": Run(optimizer="adamw"),
    "clipped": Run("faulty:accumulate=3,max_grad_norm=0.5"),
    "clipped adamw": Run("faulty:accumulate=3,max_grad_norm=0.5", "adamw"),
}

FAULTS: dict[str, list[tuple[str, Run, str]]] = {
    "sgd": [
        *((fault, Run(fault=fault), "world size") for fault in ("times W", "over W", "times sqrt W", "over sqrt W")),
        ("inner times W", Run(fault="inner times W"), "world size"),
        ("times W M", Run(fault="times W M"), "world size"),
        *((fault, Run(fault=fault), "accumulation") for fault in ("times M", "over M")),
        ("times 1.7", Run(fault="times 1.7"), "gradient scale"),
        ("sum over samples", Run(loop="sum over samples"), "sum instead of mean"),
        ("loss over accumulation", Run(fault="times M", loop="loss over accumulation"), "loss scale"),
        ("clips", Run(fault="clips"), "clipping acted"),
        ("told to clip", replace(PLAIN["clipped"]), "clipping acted"),
        ("scaled in the step", Run(fault="scaled in the step"), "world size"),
        ("schedule per process", Run(loop="schedule per process"), "schedule ran ahead"),
        ("schedule per micro-batch", Run(loop="schedule per micro-batch"), "schedule ran ahead"),
        ("schedule a step on", Run(loop="schedule a step on"), "schedule ran ahead"),
        ("half the rate", Run(loop="half the rate"), "learning rate"),
        ("stale", Run(fault="stale"), "stale parameter"),
        ("stale on rank 1", Run(fault="stale on rank 1"), "stale parameter"),
        ("freezes", Run(fault="freezes"), "stale parameter"),
        ("local", Run(fault="local"), "local gradient"),
        ("bf16 gradients", Run(fault="bf16 gradients"), "lower precision"),
        ("skips", Run("faulty:accumulate=3,on_nonfinite=skip", fault="skips"), "step skipped"),
        ("other data", Run(loop="other data"), "data"),
        ("data in another order", Run(loop="data in another order"), "data"),
        ("data, a step on", Run(loop="data, a step on"), "data"),
        ("one batch for all ranks", Run(loop="one batch for all ranks"), "data"),
        ("another start", Run(loop="another start"), "start weights"),
        ("masked", Run("faulty:accumulate=3,track_grad_norm=true", fault="masked"), "configuration"),
    ],
    "momentum": [
        ("Adam for SGD", Run(optimizer="momentum", fault="L2 decay"), "optimizer mode"),
        ("no momentum", Run(optimizer="momentum", fault="no momentum"), "optimizer mode"),
    ],
    "adamw": [
        *((f"adamw {fault}", Run(optimizer="adamw", fault=fault), "world size") for fault in ("times W", "over W")),
        ("adamw times M", Run(optimizer="adamw", fault="times M"), "accumulation"),
        ("adamw clips", Run(optimizer="adamw", fault="clips"), "clipping acted"),
        *(
            (fault, Run(optimizer="adamw", fault=fault), "optimizer mode")
            for fault in ("L2 decay", "other betas", "other eps", "no decay")
        ),
        ("adam", Run(optimizer="adam"), "optimizer mode"),
        ("eps 1e-3", Run(optimizer="adamw, eps 1e-3"), "optimizer mode"),
        ("zeros", Run(optimizer="adamw", fault="zeros"), "decay on unused parameters"),
        ("frozen decays", Run(optimizer="adamw", fault="frozen decays"), "decay on unused parameters"),
        ("adamw stale", Run(optimizer="adamw", fault="stale"), "stale parameter"),
        ("adamw local", Run(optimizer="adamw", fault="local"), "local gradient"),
        ("adamw bf16 gradients", Run(optimizer="adamw", fault="bf16 gradients"), "lower precision"),
    ],
    "clipped": [("does not clip", replace(PLAIN["clipped"], fault="does not clip"), "clipping did not act")],
    "clipped adamw": [
        ("adamw does not clip", replace(PLAIN["clipped adamw"], fault="does not clip"), "clipping did not act"),
    ],
}
"""By plain run: the name of a run that differs, the run, and the diagnosis that comes first."""

OTHERS = {
    "sgd again": Run(),
    "race": Run(fault="race 0.01"),
    "race again": Run(fault="race 0.02"),
    "race once more": Run(fault="race 0.025"),
    "two micro-batches": Run("faulty:accumulate=2"),
    "two micro-batches, times W": Run("faulty:accumulate=2", fault="times W"),
    "ranks the other way round": Run(loop="ranks the other way round"),
    "shorter": Run(steps=4),
    "fails": Run(loop="fails"),
    "another model": Run(loop="another model"),
    "attention": Run("ddp:accumulate=3", "adamw", loop="attention", steps=12),
    "ddp": Run("ddp:accumulate=3"),
    "ddp bf16": Run("ddp:accumulate=3,precision=bf16"),
    "fairscale bf16": Run("fairscale:accumulate=3,precision=bf16"),
    "times W from step 4": Run(fault="times W from step 4"),
}

STRATEGIES = {
    "ddp": "ddp",
    "fairscale": "fairscale",
    **{f"stage {stage}": f"deepspeed:stage={stage}" for stage in range(4)},
    "stage 2, offload": "deepspeed:stage=2,offload_optimizer=cpu",
    "stage 3, offload": "deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu",
}
"""Strategies that all give what one process gives."""


def kinds(name: str) -> tuple[str, ...]:
    """Return the optimizers that a strategy is recorded with."""
    return ("momentum", "adamw") if name in ("ddp", "fairscale", "stage 2") else ("adamw",)


ON_TWO = {
    **PLAIN,
    **{name: run for faults in FAULTS.values() for name, run, _ in faults},
    **OTHERS,
    **{
        f"{name}, {optimizer}": Run(f"{strategy}{',' if ':' in strategy else ':'}accumulate=3", optimizer)
        for name, strategy in STRATEGIES.items()
        for optimizer in kinds(name)
    },
}
ON_ONE = {
    "one process, bf16": Run("ddp:accumulate=2,precision=bf16"),
    **{f"one process, {kind}": Run("ddp:accumulate=6", kind) for kind in ("sgd", "momentum", "adamw")},
    "one process, attention": Run("ddp:accumulate=6", "adamw", loop="attention", steps=12),
}
