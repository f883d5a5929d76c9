"""FairScale does what one process with plain torch does on the whole global batch, or says why it can't."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit._tripwire import GRADIENT
from shardkit.testing import run

pytest.importorskip("fairscale")

FORMS = ("fairscale", "fairscale:reduce_buffer_size=40", "fairscale:shard=optimizer")
form = pytest.mark.parametrize("form", FORMS)

# Round-off of a few float32 operations in another order, on values around 1.
TOLERANCE = 2e-6


class W(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Choice(nn.Module):
    """Three layers of different sizes, of which each call names the ones to use, in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(3, 5, bias=False)
        self.b = nn.Linear(3, 7, bias=False)
        self.c = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor, names: str) -> Tensor:
        total = x.sum() * 0
        for place, name in enumerate(names):
            # Chained, so that the order of the gradients is the reverse order of use.
            total = (getattr(self, name)(x + total).tanh().mean() + total) * (1 + place)
        return total


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": parameters[::2], "weight_decay": 0.3, "name": "even"}, {"params": parameters[1::2], "lr": 2e-3}],
        lr=1e-2,
        **settings,
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


def regression(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(4, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean()


def nothing(model: nn.Module, step: int) -> None:
    pass


@dataclass(frozen=True)
class Scenario:
    """A training that is done twice: in one process with plain torch, and on the ranks of a session.

    ``losses(model, step, micro, rank)`` is one rank's loss of one micro-batch; ``before(model, step)`` happens before a
    step's first.
    """

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    losses: Callable[[nn.Module, int, int, int], Tensor] = regression
    before: Callable[[nn.Module, int], None] = nothing
    steps: int = 4
    accumulate: int = 1
    max_grad_norm: float | None = None

    def reference(self, ranks: int) -> dict[str, Any]:
        """The mean of all ranks' losses is the loss of the global batch."""
        model = self.model()
        optimizer = self.optimizer(model)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms, gradients = [], []
        for step in range(self.steps):
            self.before(model, step)
            for micro in range(self.accumulate):
                for rank in range(ranks):
                    (self.losses(model, step, micro, rank) / (ranks * self.accumulate)).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            norms.append(nn.utils.clip_grad_norm_(trained, self.max_grad_norm or float("inf")).item())
            optimizer.step()
            model.zero_grad()
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return {"norms": norms, "gradients": gradients, "weights": weights}

    def session(self, form: str) -> dict[str, Any]:
        model = self.model()
        norms, gradients = [], []
        with prepare(
            model,
            self.optimizer(model),
            form,
            accumulate=self.accumulate,
            max_grad_norm=self.max_grad_norm,
            track_grad_norm=True,
        ) as session:
            for step in range(self.steps):
                self.before(session.model, step)
                for micro in range(self.accumulate):
                    session.backward(self.losses(session.model, step, micro, session.rank))
                gradients.append(session.full_gradients())
                assert session.step()
                norms.append(session.grad_norm)
            weights = session.full_weights()
        assert all(parameter.grad is None for parameter in model.parameters())
        close({name: value.detach() for name, value in model.state_dict().items()}, weights, 0)
        return {"norms": norms, "gradients": gradients, "weights": weights}


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, form: str, **settings: Any) -> shardkit.Session:
    options = shardkit.Strategy.parse(form).options
    return shardkit.prepare(model, optimizer, shardkit.Strategy("fairscale", options=options, **settings))


# Which layers a rank uses in a micro-batch of a step: [step][micro][rank].
USES = {
    "one on one rank only": [[["abc", "ac"], ["abc", "ac"]]] * 4,
    "others on each rank": [[["ab", "c"], ["ca", "b"]]] * 4,
    "in another order on each rank": [[["abc", "cba"], ["bac", "cab"]]] * 4,
    "in the first micro-batch only": [[["abc", "abc"], ["ac", "ac"]]] * 4,
    "in the first micro-batch of one rank only": [[["abc", "ac"], ["ac", "ac"]]] * 4,
    "one never": [[["ab", "ba"], ["a", "b"]]] * 4,
    "one in every other step": [[["abc", "abc"]] * 2, [["ac", "ac"]] * 2] * 2,
    "one from the third step on": [[["ac", "ac"]] * 2] * 2 + [[["ac", "abc"]] * 2] * 2,
    "a different one in each step": [[["a", "a"]] * 2, [["b", "b"]] * 2, [["c", "c"]] * 2, [["a", "b"]] * 2],
}


def choosing(use: str) -> Callable[[nn.Module, int, int, int], Tensor]:
    def losses(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        return model(torch.randn(2, 3, generator=generator), USES[use][step][micro][rank])

    return losses


def freezing(first: bool, **changes: bool) -> Callable[[nn.Module, int], None]:
    """Set whether the first layer is trainable from the start, and from a step on: ``step2=False``."""

    def before(model: nn.Module, step: int) -> None:
        trainable = first if step == 0 else changes.get(f"step{step}")
        if trainable is not None:
            model[0].requires_grad_(trainable)  # type: ignore[index]

    return before


def frozen_mlp() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def freezing_in_mid_window(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    model[0].requires_grad_(not (step == 1 and micro == 1))  # type: ignore[index]
    return regression(model, step, micro, rank)


class Odd(nn.Module):
    """A scalar, an empty parameter, one that isn't contiguous, and one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x @ self.turned).tanh()) * self.scale
        return torch.cat([out, out @ torch.ones(4, 3) + self.empty.sum()], 1)[:, 4:]


def scaled_sgd(model: nn.Module) -> torch.optim.Optimizer:
    class Scaled(torch.optim.SGD):
        def __init__(self, model: nn.Module, *, factor: float) -> None:
            super().__init__(model.parameters(), lr=0.1)
            self.factor = factor

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        # By the norm of the whole tensor, as LARS does.
                        parameter -= self.factor * group["lr"] * parameter.grad / parameter.norm().clamp(min=1)

    return Scaled(model, factor=2.0)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}, {"params": list(model.parameters()), "lr": 0.2}], lr=0.1)


def of_the_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model[-1].named_parameters(), lr=0.01)  # type: ignore[index]


def warmed_up(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with the state of three earlier steps."""
    optimizer = adamw(model)
    for step in range(3):
        regression(model, step, 7, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def loading(model: nn.Module, step: int) -> None:
    if step == 1:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    if step == 2:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    if step == 3:
        with torch.no_grad():
            next(model.parameters()).fill_(0.25)


def checkpointed(reentrant: bool) -> Callable[[nn.Module, int, int, int], Tensor]:
    def losses(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, 6, generator=generator, requires_grad=True)
        hidden = checkpoint(model[:2], x, use_reentrant=reentrant)  # type: ignore[index]
        return checkpoint(model[2:], hidden, use_reentrant=reentrant).square().mean()  # type: ignore[index]

    return losses


def twice_forward(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return regression(model, step, 0, rank) + 3 * regression(model, step, 1, rank)


def with_second_derivatives(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x = torch.linspace(0, 1, 12).view(2, 6) * (rank + 1)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().mean() + regression(model, step, micro, rank)


def single(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return model(torch.tensor([rank + 1.0 + step]))


def in_double(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return model(torch.linspace(-1, rank + step, 6, dtype=torch.float64)).square().mean()


SCENARIOS = {
    "SGD with momentum": Scenario(),
    "AdamW in two groups": Scenario(optimizer=adamw),
    "accumulation": Scenario(optimizer=adamw, accumulate=3),
    "clipping": Scenario(accumulate=2, max_grad_norm=0.05),
    "layers frozen from the start": Scenario(model=frozen_mlp),
    "layers frozen in mid-run": Scenario(before=freezing(True, step2=False), accumulate=2, max_grad_norm=0.1),
    "layers thawed in mid-run": Scenario(model=frozen_mlp, before=freezing(False, step2=True), optimizer=adamw),
    "layers frozen and thawed again": Scenario(before=freezing(True, step1=False, step3=True), accumulate=2),
    "layers frozen in mid-window": Scenario(losses=freezing_in_mid_window, accumulate=2),
    "parameters of odd kinds": Scenario(model=Odd, max_grad_norm=0.5),
    "parameters outside of the optimizer": Scenario(optimizer=of_the_last_layer, max_grad_norm=0.1),
    "an empty group": Scenario(optimizer=in_groups),
    "fewer parameters than ranks": Scenario(model=W, losses=single, optimizer=adamw),
    "an optimizer of one's own": Scenario(optimizer=scaled_sgd),
    "an optimizer with state": Scenario(optimizer=warmed_up),
    "weights loaded after prepare": Scenario(before=loading),
    "checkpointing": Scenario(losses=checkpointed(False)),
    "two forwards a backward": Scenario(losses=twice_forward, accumulate=2),
    "second derivatives": Scenario(losses=with_second_derivatives),
    "double precision": Scenario(model=lambda: mlp().double(), losses=in_double, max_grad_norm=0.1),
    **{
        f"layers used {use}": Scenario(model=Choice, losses=choosing(use), accumulate=2, max_grad_norm=0.05)
        for use in USES
    },
}
# DistributedDataParallel can't follow them.
OF_SHARDED_GRADIENTS = {"reentrant checkpointing": Scenario(losses=checkpointed(True))}
AT_OTHER_SIZES = ("AdamW in two groups", "clipping", "layers thawed in mid-run", "fewer parameters than ranks")


def record(form: str, names: list[str]) -> dict[str, Any]:
    """Return what each scenario came to on this rank, or how it failed."""
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = {**SCENARIOS, **OF_SHARDED_GRADIENTS}[name].session(form)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
            break
    return results


@cache
def recorded(form: str, ranks: int) -> list[dict[str, Any]]:
    names = AT_OTHER_SIZES if ranks != 2 else [*SCENARIOS, *(OF_SHARDED_GRADIENTS if "shard" not in form else ())]
    return run(record, form, list(names), processes=ranks)


def check(form: str, name: str, ranks: int) -> None:
    expected = {**SCENARIOS, **OF_SHARDED_GRADIENTS}[name].reference(ranks)
    results = [result.get(name, "an earlier scenario failed") for result in recorded(form, ranks)]
    for found in results:
        assert not isinstance(found, str), found
        close(found["weights"], expected["weights"])
        assert found["norms"] == results[0]["norms"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        for mine, right in zip(found["gradients"], expected["gradients"], strict=True):
            close(mine, right)


# The suite tries much the same.
@pytest.mark.slow
@form
@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_as_one_process_on_the_global_batch_does(form: str, name: str) -> None:
    check(form, name, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SHARDED_GRADIENTS)
def test_trains_with_sharded_gradients_as_one_process_does(name: str) -> None:
    check("fairscale", name, ranks=2)


@pytest.mark.parametrize(
    ("form", "ranks"), [*((form, ranks) for form in FORMS[::2] for ranks in (1, 3)), (FORMS[0], 4)]
)
@pytest.mark.slow
@pytest.mark.parametrize("name", AT_OTHER_SIZES)
def test_trains_at_other_world_sizes(form: str, name: str, ranks: int) -> None:
    check(form, name, ranks)


def of_the_failure(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).abs().sum()


class Sparse(nn.Module):
    """Makes a sparse gradient that no attribute of the module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.table = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.embedding(torch.tensor([1, 3]), self.table, sparse=True) * self.w * x.sum()).sum()


def refusals(form: str) -> dict[str, str]:
    """Return what each thing that can't be done right is refused with on this rank."""

    def attempt(
        model: nn.Module,
        losses: Callable[[nn.Module, int, int, int], Tensor] = single,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        before: Callable[[nn.Module, int], None] = nothing,
    ) -> str:
        def train() -> None:
            session = prepare(model, optimizer(model), form, track_grad_norm=True)
            try:
                for step in range(2):
                    before(model, session.rank if step else -1)
                    session.backward(losses(model, step, 0, session.rank))
                    session.step()
            finally:
                session.close()

        return of_the_failure(train)

    def assign(model: nn.Module, rank: int) -> None:
        if rank >= 0:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def freeze_on_one_rank(model: nn.Module, rank: int) -> None:
        if rank == 0:
            model[0].requires_grad_(False)  # type: ignore[index]

    def shared_in_reentrant(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        x = torch.ones(2, 16, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model[2], x, use_reentrant=True)  # type: ignore[index]
        return x.sum()

    def state_on_one_rank(model: nn.Module) -> torch.optim.Optimizer:
        return warmed_up(model) if os.environ["RANK"] == "1" else adamw(model)

    embedding = nn.Embedding(4, 2, sparse=True)
    return {
        "complex": attempt(Complex()),
        "dtypes": attempt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
        "sparse layer": attempt(embedding),
        "replaced": attempt(mlp(), regression, before=assign),
        "frozen on one rank": attempt(mlp(), regression, before=freeze_on_one_rank),
        "reentrant": attempt(mlp(), shared_in_reentrant),
        "sparse": attempt(Sparse()) if "shard" not in form else "",
        "state": attempt(mlp(), regression, state_on_one_rank),
        "capturable": attempt(W(), optimizer=lambda model: torch.optim.AdamW(model.parameters(), capturable=True)),
        "nothing": attempt(mlp(), regression),
    }


@cache
def refused(form: str) -> list[dict[str, str]]:
    return run(refusals, form, timeout=60)


@form
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("complex", ["UnsupportedError", "'fairscale'", "complex", "'w'", "'ddp'"]),
        ("dtypes", ["UnsupportedError", "'fairscale'", "torch.float64", "'1.bias'", "'ddp'"]),
        ("sparse layer", ["UnsupportedError", "'fairscale'", "Embedding", "sparse=False"]),
        ("replaced", ["InputError", "'fairscale'", "other parameters", "assign=True"]),
        ("frozen on one rank", ["InputError", "'fairscale'", "'0.weight'", "some ranks only"]),
        ("reentrant", ["UnsupportedError", "'fairscale'", "use_reentrant=False"]),
        ("sparse", ["UnsupportedError", "'fairscale'", "'table'", "sparse"]),
        ("state", ["InputError", "'fairscale'", "state"]),
        ("capturable", ["capturable"]),
        ("nothing", ["no failure"]),
    ],
)
def test_refuses_on_every_rank_alike(form: str, what: str, words: list[str]) -> None:
    first, second = (result[what] for result in refused(form))
    if what == "sparse" and "shard" in form:
        pytest.skip("DistributedDataParallel's own error, on the ranks that have the gradient")
    assert first == second
    for word in words:
        assert word in first


class ByHand(nn.Module):
    """A loss whose gradient is known: (3, 4) times the input, at two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: float) -> Tensor:
        return (3 * self.a + 4 * self.b) * x


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def life(form: str, directory: str) -> dict[str, Any]:
    """Return what several short sessions on this rank came to."""
    found: dict[str, Any] = {"handlers": list(logging.getLogger().handlers)}

    model = ByHand()
    with prepare(model, sgd(model, 1.0), form, max_grad_norm=1.0) as session:
        session.backward(session.model((0.5, 1.5)[session.rank]))
        session.step()
        found["norm"] = session.grad_norm
    found["clipped"] = [model.a.item(), model.b.item()]

    # A gradient that isn't finite, on one rank only.
    for norm in (True, False):
        model = mlp()
        with prepare(model, adamw(model), form, track_grad_norm=norm, on_nonfinite="skip") as session:
            for step in range(3):
                before = session.full_weights()
                loss = regression(model, step, 0, session.rank)
                if step == 1 and session.rank == 1:
                    # The loss is finite; the gradient at its square root isn't.
                    loss = loss + (model[2].bias[0] * 0).abs().sqrt()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    session.backward(loss)
                    found[f"moved {step} {norm}"] = session.step()
                if step == 1:
                    close(session.full_weights(), before, 0)

    # A schedule built before, and one built after; hooks of the user.
    model, calls = mlp(), []
    optimizer = adamw(model)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda which, *_: calls.append(which is optimizer))
    with prepare(model, optimizer, form) as session:
        late = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda epoch: 1 / (1 + epoch))
        for step in range(3):
            session.backward(regression(model, step, 0, session.rank))
            session.step()
            (early if step < 2 else late).step()
        found["same optimizer"] = session.optimizer is optimizer
        found["scheduled"] = session.full_weights()
    found["hooks"] = calls

    # To go on from a checkpoint, in a session that was elsewhere.
    model = mlp()
    with prepare(model, adamw(model, amsgrad=True), form) as session:
        for step in range(4):
            if step == 2:
                session.save(directory)
            session.backward(regression(model, step, 0, session.rank))
            session.step()
        found["uninterrupted"] = session.full_weights()
    other = Scenario(optimizer=adamw).model()
    with torch.no_grad():
        other[0].weight.zero_()
    with prepare(other, adamw(other, amsgrad=True), form) as session:
        session.backward(regression(other, 9, 0, session.rank))
        session.step()
        for attempt in ("resumed", "resumed again"):
            session.load(directory)
            for step in (2, 3):
                session.backward(regression(other, step, 0, session.rank))
                session.step()
            found[attempt] = session.full_weights()

    # What remains after a session, and a second one on it.
    found["hooked"] = [
        name for name, value in other.named_parameters() if value._backward_hooks or value.grad is not None
    ]
    found["storages"] = len({value.untyped_storage().data_ptr() for value in other.parameters()})
    gc.collect()
    with shardkit.prepare(other, sgd(other), "ddp") as session:
        session.backward(regression(other, 0, 0, session.rank))
        found["after ddp"] = session.step()
    other.zero_grad()
    regression(other, 0, 0, 0).backward()
    found["local"] = all(value.grad is not None for value in other.parameters())
    found["logging"] = logging.getLogger().handlers == found.pop("handlers")
    return found


@cache
def lived(form: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        return run(life, form, directory)


@form
def test_clips_by_the_global_norm_and_reports_it_unclipped(form: str) -> None:
    for found in lived(form):
        assert found["norm"] == pytest.approx(5.0)
        assert found["clipped"] == pytest.approx([-0.6, -0.8], abs=1e-6)


@form
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(form: str) -> None:
    for found in lived(form):
        for norm in (True, False):
            assert [found[f"moved {step} {norm}"] for step in range(3)] == [True, False, True]


@form
def test_schedules_and_hooks_of_the_users_optimizer_hold(form: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    for step in range(3):
        ((regression(model, step, 0, 0) + regression(model, step, 0, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        (early if step < 2 else late).step()
    for found in lived(form):
        close(found["scheduled"], {name: value.detach() for name, value in model.state_dict().items()})
        assert found["same optimizer"]
        assert found["hooks"] == [True] * 3


@form
def test_goes_on_from_a_checkpoint_to_the_last_bit(form: str) -> None:
    for found in lived(form):
        close(found["resumed"], found["uninterrupted"], 0)
        close(found["resumed again"], found["uninterrupted"], 0)


@form
def test_leaves_the_module_and_the_logging_as_they_were(form: str) -> None:
    for found in lived(form):
        assert found["hooked"] == []
        assert found["storages"] == 6
        assert found["after ddp"]
        assert found["local"]
        assert found["logging"]


def test_describes_itself_without_torch_or_fairscale() -> None:
    code = (
        "import sys, shardkit_fairscale as plugin; print(plugin.shardkit_describe().name, "
        "[name for name in ('torch', 'fairscale') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fairscale []"


def memory_of_the_shards(form: str) -> dict[str, int]:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    held: dict[str, int] = {}
    with prepare(model, torch.optim.Adam(model.parameters()), form) as session:
        x = torch.ones(2, 64)
        session.backward(model(x).square().mean())
        # Past the session's refusal to show a part for the whole.
        gradients = [GRADIENT.__get__(value) for value in model.parameters()]
        held["gradients"] = sum(gradient.numel() for gradient in gradients if gradient is not None)
        session.step()
        held["state"] = sum(entry["exp_avg"].numel() for entry in session._engine.stepper.state.values())
    held["of the model"] = sum(p.numel() for p in model.parameters())
    return held


@form
def test_each_rank_holds_its_part_only(form: str) -> None:
    for held in run(memory_of_the_shards, form):
        half = held["of the model"] // 2
        assert held["state"] == half
        assert held["gradients"] == (half if "shard" not in form else held["of the model"])
