"""DeepSpeed with weights in half precision. What is expected is worked out by hand, or by plain torch."""

from __future__ import annotations

import copy
import dataclasses
import re
import traceback
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Session, Strategy
from shardkit.testing import run
from shardkit.testing.cases._models import Two, W, assert_close, batch, mlp, sgd, step
from tests.parity.models import MODELS, Model
from tests.parity.tolerances import HALF_WEIGHTS_OVER_AUTOCAST

SHARDED = (
    "stage=1",
    "stage=2",
    "stage=3",
    "stage=1,offload_optimizer=cpu",
    "stage=2,offload_optimizer=cpu",
    "stage=3,offload_optimizer=cpu,offload_parameters=cpu",
)
CASES: dict[str, Callable[[str, str], Any]] = {}


def case(function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    CASES[function.__name__] = function
    return function


def prepare(settings: str, model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any) -> Session:
    options = {"half_weights": True, **dict(pair.split("=") for pair in settings.split(","))}
    return shardkit.prepare(model, optimizer, Strategy("deepspeed", **{"precision": "bf16", **fields}, options=options))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# The cases: each runs on two ranks, and returns what the test looks at.


@case
def small_updates(settings: str, folder: str) -> Any:
    model = W(1)
    kinds = [model.w.dtype]
    with prepare(settings, model, sgd(model, lr=1e-4)) as session:
        for _ in range(10):
            step(session, session.model([session.rank + 1]))
        kinds += [model.w.dtype, session.full_weights()["w"].dtype]
        weight = session.full_weights()["w"].item()
    return weight, model.w.item(), [*kinds, model.w.dtype]


@case
def starts_from(settings: str, folder: str) -> Any:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with prepare(settings, model, adamw(model)) as session:
        held = session.full_weights()
    return all(
        torch.equal(held[name], value) and torch.equal(model.state_dict()[name], value)
        for name, value in before.items()
    )


@case
def fails(settings: str, folder: str) -> Any:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    # SGD doesn't look at it, and there is no telling which part of it is whose.
    optimizer.state[model[0].weight] = {"odd": torch.zeros(3)}
    try:
        prepare(settings, model, optimizer)
    except shardkit.errors.UnsupportedError as error:
        text = str(error)
    same = all(value.equal(before[name]) and value.dtype is torch.float32 for name, value in model.state_dict().items())
    return text, same


@case
def fine_gradients(settings: str, folder: str) -> Any:
    found = []
    for values in (([64.0, 0.25, 0.25, 0.25], [64.0, 0.25, 0.25, 0.25]), ([64.0], [0.25])):
        model = W(1)
        with prepare(settings, model, sgd(model, lr=2.0**-10), accumulate=len(values[0])) as session:
            for _ in range(2):
                # A gradient of x times the window's share is exact: x is scaled by the window's length.
                for value in values[session.rank]:
                    session.backward(session.model([value * len(values[0])]))
                    if session._count.micro == len(values[0]):
                        gradient = session.full_gradients()["w"]
                    session.step()
            found.append((gradient.item(), gradient.dtype, session.full_weights()["w"].item()))
    return found


@case
def clips(settings: str, folder: str) -> Any:
    model = Two()
    with prepare(settings, model, sgd(model, lr=1.0), max_grad_norm=1.0) as session:
        session.backward(session.model([0.5, 1.5][session.rank]))
        session.step()
        weights = session.full_weights()
        return weights["a"].item(), weights["b"].item(), session.grad_norm


@case
def skips(settings: str, folder: str) -> Any:
    model = mlp()
    with prepare(settings, model, adamw(model), on_nonfinite="skip", accumulate=2) as session:
        for place in (None, 1, None):
            before = session.full_weights()
            for micro in range(2):
                loss = session.model(batch(micro, session.rank)).square().mean()
                session.backward(loss * (float("inf") if session.rank == place and micro == 0 else 1.0))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    moved = session.step()
            after = session.full_weights()
            if place is not None:
                kept = all(torch.equal(before[name], after[name]) for name in before)
        return moved, kept, session.skipped_steps, all(bool(value.isfinite().all()) for value in after.values())


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Packed:
    values: Tensor
    note: str


class Taker(nn.Module):
    """Tells the types of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, ids: Tensor, x: Tensor, *, more: dict[str, Any]) -> Tensor:
        inner = [more["list"][0], more["pair"].first, more["pair"].second, more["packed"].values]
        self.seen = [ids.dtype, x.dtype, *(value.dtype for value in inner), more["packed"].note, type(more["mask"])]
        return self.layer(self.embed(ids) + x).sum()


@case
def casts_inputs(settings: str, folder: str) -> Any:
    model = Taker()
    with prepare(settings, model, sgd(model)) as session:
        x = torch.ones(2, 8)
        more = {
            "list": [x.double()],
            "pair": Pair(x, torch.ones(2, dtype=torch.bool)),
            "packed": Packed(x, "kept"),
            "mask": None,
        }
        loss = session.model(torch.tensor([0, 3]), x, more=more)
        moved = step(session, loss)
        return model.seen, loss.dtype, moved, x.dtype, more["packed"].values.dtype


@case
def normalizes(settings: str, folder: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.Linear(4, 1)
    )
    with prepare(settings, model, sgd(model)) as session:
        # Exact in bf16.
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 5.0, 8.0]]) + session.rank
        session.backward(session.model(x).square().mean())
        names = sorted(session.full_gradients())
        session.step()
        mean, variance = model[0].running_mean, model[0].running_var
        found = (mean.dtype, mean.tolist(), variance.tolist(), session.full_weights()["0.running_mean"].tolist())
        inner = {type(model[0].weight).__name__, *model[0]._parameters}
    return names, found, inner, "_shardkit_own" in vars(model[0])


@case
def loads_weights(settings: str, folder: str) -> Any:
    fine = 1 + 2.0**-12
    found = []
    for whole in (True, False):
        model = mlp()
        with prepare(settings, model, sgd(model, lr=2.0**-10)) as session:
            before = session.full_weights()
            given = {name: torch.full_like(value, fine) for name, value in before.items() if whole or "0." in name}
            session.model.load_state_dict(given, strict=whole)
            after = session.full_weights()
            found.append({name: torch.equal(after[name], given.get(name, before[name])) for name in before})
            step(session, 0 * session.model(batch(0, session.rank)).sum())
            later = session.full_weights()
            found.append({name: torch.equal(after[name], later[name]) for name in before})
    return found


@case
def writes_weights(settings: str, folder: str) -> Any:
    if "stage=3" in settings:
        return None
    model = mlp()
    with prepare(settings, model, sgd(model)) as session:
        before = session.full_weights()
        with torch.no_grad():
            model[0].weight[3:5].fill_(0.5)
            model[2].bias.data.copy_(torch.arange(8.0))
        expected = {name: value.clone() for name, value in before.items()}
        expected["0.weight"][3:5] = 0.5
        expected["2.bias"] = torch.arange(8.0)
        equal = [all(torch.equal(session.full_weights()[name], value) for name, value in expected.items())]
        step(session, 0 * session.model(batch(0, session.rank)).sum())
        equal.append(all(torch.equal(session.full_weights()[name], value) for name, value in expected.items()))
        return equal


@case
def resumes(settings: str, folder: str) -> Any:
    def losses(session: Session, first: int) -> list[float]:
        found = []
        for index in range(first, first + 3):
            loss = session.model(batch(index, session.rank)).square().mean()
            step(session, loss)
            found.append(loss.item())
        return found

    model = mlp()
    with prepare(settings, model, adamw(model)) as session:
        losses(session, 0)
        session.save(folder)
        first = losses(session, 3), session.full_weights()
    other = mlp(seed=3)
    with prepare(settings, other, adamw(other)) as session:
        session.load(folder)
        second = losses(session, 3), session.full_weights()
    return first[0] == second[0], all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@case
def gives_back(settings: str, folder: str) -> Any:
    model = mlp()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    found = []
    for again in (settings, "stage=2"):
        with prepare(again, model, adamw(model)) as session:
            for index in range(2):
                step(session, session.model(batch(index, session.rank)).square().mean())
            held = session.full_weights()
        found.append(all(torch.equal(held[name], value) for name, value in model.state_dict().items()))
        found.append({value.dtype for value in model.state_dict().values()} == {torch.float32})
        found.append({name: set(vars(part)) for name, part in model.named_modules()} == attributes)
        found.append(torch.equal(model[0].weight, frozen.bfloat16().float()))
        found.append(model(batch(0, 0)).dtype is torch.float32)
    return found


class Odd(nn.Module):
    """A 0-dim parameter, a tied one, and one that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one, self.two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.two.weight = self.one.weight
        self.spare = nn.Linear(1, 1)
        with torch.no_grad():
            self.one.weight.fill_(0.5)
            self.spare.weight.fill_(0.7)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        out = self.two(self.one(x)) * self.scale
        return (out + self.spare(x)).sum() if spare else out.sum()


@case
def odd_parameters(settings: str, folder: str) -> Any:
    model = Odd()
    before = model.spare.weight.item()
    with prepare(settings, model, adamw(model)) as session:
        session.backward(session.model(torch.ones(1, 1), False))
        gradients = {name: value.tolist() for name, value in session.full_gradients().items()}
        session.step()
        weights = session.full_weights()
    return (
        gradients,
        weights["spare.weight"].item() == before,
        model.one.weight is model.two.weight,
        weights["scale"].shape,
    )


@case
def memory(settings: str, folder: str) -> Any:
    model = mlp()
    with prepare(settings, model, adamw(model)) as session:
        step(session, session.model(batch(0, session.rank)).square().mean())
        engine: Any = session._engine
        shards = [getattr(value, "ds_tensor", value) for value in model.parameters()]
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in shards}
        masters = engine._fragments.flats()
        state = [
            part for entry in engine._fragments.twin.state.values() for name, part in entry.items() if name != "step"
        ]
        return {
            "weights": sum(storages.values()),
            "masters": sum(part.nbytes for part in masters),
            "state": sum(part.nbytes for part in state),
            "kinds": {str(part.dtype) for part in (*masters, *state)},
        }


STEPS, SEEDS = 10, 3


def trains(settings: str, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    workload = MODELS[name]
    for seed in range(SEEDS):
        model = workload.build(seed)
        losses = []
        with prepare(settings, model, adamw(model)) as session:
            for index in range(STEPS):
                loss = workload.loss(session.model, workload.part(index, session.rank, 2, 0, 1))
                session.backward(loss)
                session.step()
                losses.append(loss.item())
            found.append((losses, session.full_weights()))
    return found


def trained(workload: Model, seed: int, *, dtype: torch.dtype) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return each rank's losses, and the weights, of plain torch in one process: float64, or autocast to bf16."""
    model = workload.build(seed)
    if dtype is torch.float64:
        model.double()
    optimizer = adamw(model)
    losses: list[list[float]] = [[], []]
    for index in range(STEPS):
        for rank in range(2):
            part = workload.part(index, rank, 2, 0, 1)
            if dtype is torch.float64:
                part = {key: value.double() if value.is_floating_point() else value for key, value in part.items()}
            plain = model.forward
            with pytest.MonkeyPatch.context() as patch:
                if dtype is torch.bfloat16:
                    patch.setattr(model, "forward", _autocast(plain))
                loss = workload.loss(model, part)
            (loss / 2).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().double() for name, value in model.named_parameters()}


def _autocast(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = plain(*args, **kwargs)
        if isinstance(out, Tensor):
            return out.float()
        out.logits = out.logits.float()
        return out

    return forward


@cache
def expected(name: str, seed: int) -> Any:
    return [trained(MODELS[name], seed, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]


def distances(found: Any, exact: Any) -> tuple[float, float]:
    """Return the largest relative distance of a loss, and the L2 distance of all weights."""
    loss = max(
        abs(one - other) / abs(other)
        for ones, others in zip(found[0], exact[0], strict=True)
        for one, other in zip(ones, others, strict=True)
    )
    weight = sum(float((found[1][name].double() - value).square().sum()) for name, value in exact[1].items())
    return loss, weight**0.5


def _all_cases(settings: str, names: list[str], folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = CASES[name](settings, folder)
        except Exception:
            results[name] = traceback.format_exc()
    return results


_RESULTS: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(params=SHARDED)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Give what each rank got in a case. All cases of a strategy run once, in one pair of processes."""

    def look(name: str) -> list[Any]:
        settings = request.param
        if settings not in _RESULTS:
            folder = str(tmp_path_factory.mktemp("half") / "state")
            _RESULTS[settings] = run(_all_cases, settings, list(CASES), folder, processes=2, timeout=150)
        results = [rank[name] for rank in _RESULTS[settings]]
        for result in results:
            assert not (isinstance(result, str) and result.startswith("Traceback")), result
        return results

    return look


def test_updates_too_small_for_bf16_add_up_in_float32_masters(found: Any) -> None:
    for weight, after, kinds in found("small_updates"):
        assert_close(weight, 1 - 10 * 1.5e-4)
        assert after == weight
        assert kinds == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_masters_start_from_the_weights_that_were_handed_over_not_from_rounded_ones(found: Any) -> None:
    assert found("starts_from") == [True, True]


def test_a_refusal_after_the_cast_leaves_the_module_in_float32(found: Any) -> None:
    for text, same in found("fails"):
        assert "can't shard the optimizer's state 'odd'" in text
        assert same


def test_gradients_are_accumulated_and_averaged_in_float32(found: Any) -> None:
    for (window, kind, weight), (average, other_kind, other_weight) in found("fine_gradients"):
        # bf16 has steps of 0.5 at 64, and of 0.25 at 32.
        assert window == 64.75
        assert average == 32.125
        assert kind is other_kind is torch.float32
        assert weight == 1 - 2 * 64.75 * 2.0**-10
        assert other_weight == 1 - 2 * 32.125 * 2.0**-10


def _thirds(settings: str) -> Tensor:
    model = W(1)
    with prepare(settings, model, sgd(model)) as session:
        session.backward(session.model([1.0]))
        return session.full_gradients()["w"]


@pytest.mark.parametrize("settings", ["stage=1", "stage=2", "stage=3", "stage=2,contiguous_gradients=false"])
def test_the_mean_over_three_ranks_is_taken_in_float32(settings: str) -> None:
    # A third isn't a number of bf16, and three of them would be 1.002.
    for gradient in run(_thirds, settings, processes=3, timeout=90):
        assert_close(gradient, [1.0], 1e-6)


def test_clipping_uses_the_norm_of_the_averaged_gradient(found: Any) -> None:
    for a, b, norm in found("clips"):
        assert_close([a, b, norm], [-0.6, -0.8, 5.0])


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(found: Any) -> None:
    assert found("skips") == [(True, True, 1, True)] * 2


def test_floating_point_inputs_are_cast_wherever_they_are_and_outputs_are_float32(found: Any) -> None:
    low = torch.bfloat16
    for seen, kind, moved, outside, packed in found("casts_inputs"):
        assert seen == [torch.int64, low, low, low, torch.bool, low, "kept", type(None)]
        assert kind is outside is packed is torch.float32
        assert moved


def test_statistics_stay_float32_and_are_those_of_rank_0_after_a_step(found: Any) -> None:
    for names, (kind, mean, variance, whole), inner, left in found("normalizes"):
        assert names == sorted(
            f"{at}.{name}" for at in range(6) for name in ("weight", "bias") if (at, name) != (4, "bias")
        )
        assert kind is torch.float32
        assert mean == pytest.approx([0.2, 0.2, 0.4, 0.6])
        assert variance == pytest.approx([1.1, 0.9, 1.1, 1.7])
        assert whole == mean
        assert inner == {"Parameter", "weight", "bias"}
        assert not left


def test_weights_loaded_after_prepare_reach_the_masters_unrounded_and_others_stay(found: Any) -> None:
    for results in found("loads_weights"):
        assert all(all(equal.values()) for equal in results), results


def test_weights_written_after_prepare_count_and_others_keep_their_precision(found: Any) -> None:
    for equal in found("writes_weights"):
        assert equal in (None, [True, True])


def test_a_checkpoint_resumes_to_the_last_bit(found: Any) -> None:
    assert found("resumes") == [(True, True)] * 2


def test_the_module_comes_back_in_float32_with_the_masters_values(found: Any) -> None:
    for equal in found("gives_back"):
        assert all(equal), equal


def test_tied_scalar_and_unused_parameters_train_as_elsewhere(found: Any) -> None:
    for gradients, kept, tied, shape in found("odd_parameters"):
        # f = scale w w: 2 scale w = 2, and w w = 0.25.
        assert gradients == {"scale": 0.25, "one.weight": [[2.0]]}
        assert kept
        assert tied
        assert shape == ()


def test_a_rank_holds_half_weights_and_its_part_of_masters_and_state(found: Any, request: Any) -> None:
    elements = sum(value.numel() for value in mlp().parameters())
    whole = "stage=3" not in request.node.callspec.params["found"]
    for held in found("memory"):
        assert held == {
            "weights": 2 * elements if whole else elements,
            "masters": 4 * elements // 2,
            "state": 2 * 4 * elements // 2,
            "kinds": {"torch.float32"},
        }


@pytest.mark.parametrize("name", ["mlp", "gpt2_tiny"])
@pytest.mark.parametrize("settings", ["stage=1", "stage=2", "stage=3,offload_optimizer=cpu"])
def test_losses_and_weights_are_about_as_far_from_float64_as_those_of_autocast(settings: str, name: str) -> None:
    ranks = run(trains, settings, name, processes=2, timeout=150)
    here, there = [], []
    for seed in range(SEEDS):
        exact, autocast = expected(name, seed)
        here.append(distances(([rank[seed][0] for rank in ranks], ranks[0][seed][1]), exact))
        there.append(distances(autocast, exact))
    for half, plain in zip(zip(*here, strict=True), zip(*there, strict=True), strict=True):
        assert sum(half) <= HALF_WEIGHTS_OVER_AUTOCAST * sum(plain), (here, there)


def _refused(settings: dict[str, Any], precision: str) -> str:
    model = W(1)
    try:
        shardkit.prepare(model, sgd(model), Strategy("deepspeed", precision=precision, options=settings)).close()
    except shardkit.errors.ShardkitError as error:
        return f"{type(error).__name__}: {error} {model.w.dtype}"
    return "trained"


@pytest.mark.parametrize(
    ("settings", "precision", "words"),
    [
        ({"half_weights": True}, "fp32", "StrategyError: .*precision, which is 'fp32': ask for precision='bf16'"),
        ({"half_weights": True, "stage": 0}, "bf16", "StrategyError: .*needs stage 1, 2 or 3"),
        ({"half_weights": True, "stage": 3}, "fp16", "UnsupportedError: .*fp16 on cpu.*precision=fp16 without"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_alike_on_every_rank(
    settings: dict[str, Any], precision: str, words: str
) -> None:
    if precision == "fp16" and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("needs a CPU without fp16: this one computes in it")
    first, second = run(_refused, settings, precision, processes=2, timeout=60)
    assert first == second
    assert re.match(words, first), first
    assert first.endswith("torch.float32")
