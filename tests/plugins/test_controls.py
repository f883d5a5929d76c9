"""A control is the library by itself: right where that is right, with its own defaults, and never driven blindly."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardkit
from shardkit import Backend, Strategy, Variant, hookimpl
from shardkit._prepare import open_session
from shardkit._registry import _manager, _registered
from shardkit.errors import InputError, MissingLibraryError, PluginError, ShardkitError, UnsupportedError
from shardkit.testing import run
from shardkit.testing.cases._models import W, sgd

DEEPSPEED = (
    *(f"deepspeed:stage={stage}" for stage in range(4)),
    "deepspeed:stage=1,offload_optimizer=cpu",
    "deepspeed:stage=2,offload_optimizer=cpu",
    "deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu",
)
FAIRSCALE = ("fairscale", "fairscale:shard=optimizer")


def arms(*strategies: str) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for each strategy whose library is there."""
    given = []
    for strategy in strategies:
        library = strategy.partition(":")[0].replace("zero", "torch")
        missing = importlib.util.find_spec(library) is None
        given.append(pytest.param(strategy, marks=pytest.mark.skipif(missing, reason=f"{library} is not installed")))
    return pytest.mark.parametrize("control", given)


# Round-off of a few float32 operations in another order, on values around 1.
TOLERANCE = 2e-6
STEPS = 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2]}], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


OPTIMIZERS = {"adamw": adamw, "sgd": momentum}
# Optimizer, accumulate, max_grad_norm.
RUNS = (("adamw", 1, None), ("adamw", 2, None), ("sgd", 1, None), ("sgd", 2, None), ("sgd", 2, 0.05))
runs = pytest.mark.parametrize("given", RUNS, ids=lambda given: f"{given[0]}-accumulate={given[1]}-clip={given[2]}")


def regression(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(4, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean()


def falling(step: int) -> float:
    return 0.5**step


@cache
def reference(name: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    """Train in one process, on the batches of both ranks."""
    model = mlp()
    optimizer = OPTIMIZERS[name](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        parts = [regression(model, step, micro, rank) for micro in range(accumulate) for rank in range(2)]
        losses.append([part.item() for part in parts])
        (sum(parts) / len(parts)).backward()
        gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train(control: str, name: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    model = mlp()
    parsed = Strategy.parse(control)
    strategy = Strategy(
        parsed.backend, options=parsed.options, accumulate=accumulate, max_grad_norm=clip, track_grad_norm=True
    )
    losses, norms, gradients = [], [], []
    with open_session(model, OPTIMIZERS[name](model), strategy, control=True) as session:
        schedule = torch.optim.lr_scheduler.LambdaLR(session.optimizer, falling)
        for step in range(STEPS):
            told = []
            for micro in range(accumulate):
                loss = regression(session.model, step, micro, session.rank)
                told.append(loss.item())
                session.backward(loss)
            losses.append([value for pair in zip(*_told(session, told), strict=True) for value in pair])
            gradients.append(session.full_gradients())
            assert session.step()
            norms.append(session.grad_norm)
            schedule.step()
        weights = session.full_weights()
        for shard in session._engine.weight_shards():
            whole = weights[shard.name].flatten()
            assert torch.equal(shard.values.flatten(), whole[shard.start : shard.start + shard.values.numel()])
    # The module is the user's again.
    assert all(type(value) is nn.Parameter and value.grad is None for value in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    regression(model, 0, 0, 0).backward()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def _told(session: shardkit.Session, losses: list[float]) -> list[list[float]]:
    whole: list[float] = session.gather(torch.tensor(losses, dtype=torch.float64)).tolist()
    return [whole[: len(losses)], whole[len(losses) :]]


def train_all(control: str, extensions: str) -> list[dict[str, Any]]:
    import os

    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    return [train(control, *given) for given in RUNS]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[dict[str, Any]]]]:
    """Return what a control did in all runs, on each rank, one after another in the same processes."""

    @cache
    def trace(control: str) -> list[list[dict[str, Any]]]:
        extensions = tmp_path_factory.mktemp("extensions")
        found = run(train_all, control, str(extensions), processes=2, timeout=120)
        assert not list(extensions.iterdir()), "something was compiled"
        return found

    return trace


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@arms(*DEEPSPEED, *FAIRSCALE, "zero")
@runs
def test_a_control_trains_as_one_process_with_plain_torch_does(traces: Any, control: str, given: Any) -> None:
    expected = reference(*given)
    # Above 1 the library's own default would clip.
    assert given[2] is not None or max(expected["norms"]) < 1
    for trace in traces(control):
        found = trace[RUNS.index(given)]
        for kind in ("losses", "norms", "weights"):
            close(found[kind], expected[kind])
        for gradients, whole in zip(found["gradients"], expected["gradients"], strict=True):
            close(gradients, whole)


def one_step(control: str) -> float:
    model = W(1)
    with open_session(model, sgd(model), control, control=True) as session:
        session.backward(session.model([10.0]))
        session.step()
        return session.full_weights()["w"].item()


@arms(*DEEPSPEED)
def test_without_a_word_of_clipping_deepspeed_clips_at_its_own_default(control: str) -> None:
    # The gradient is 10 and the rate 0.1. DeepSpeed 0.19.8 scales it to norm 1, so that the weight goes to 1 - 0.1.
    assert run(one_step, control, timeout=60) == pytest.approx([0.9, 0.9], abs=1e-6)


@arms(*DEEPSPEED)
def test_a_bound_that_is_asked_for_is_said_to_deepspeed(control: str) -> None:
    assert run(one_step, f"{control},max_grad_norm=4", timeout=60) == pytest.approx([0.6, 0.6], abs=1e-6)


@arms(*FAIRSCALE, "zero")
def test_without_a_word_of_clipping_others_do_not_clip(control: str) -> None:
    assert run(one_step, control, timeout=60) == pytest.approx([0.0, 0.0], abs=1e-6)


def running_mean(control: str) -> float:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    with open_session(model, sgd(model), control, control=True) as session:
        x = torch.tensor([[0.0], [2.0]]) + 10 * session.rank
        session.backward(session.model(x).square().mean())
        session.step()
        return session.full_weights()["0.running_mean"].item()


@arms("deepspeed:stage=1", "deepspeed:stage=3")
def test_what_deepspeed_does_not_do_with_buffers_nobody_does(control: str) -> None:
    # The batches' means are 1 and 11, the momentum is 0.1, and each rank goes its own way.
    assert run(running_mean, control, timeout=60) == pytest.approx([0.1, 1.1])


@arms("deepspeed:stage=1", "deepspeed:stage=3", *FAIRSCALE, "zero")
def test_a_control_trains_in_a_process_alone(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert run(one_step_alone, control, processes=1, timeout=60) == [(pytest.approx(0.95, abs=1e-6), [])]


def one_step_alone(control: str) -> tuple[float, list[str]]:
    """Return the weight, and which variables of the environment are others afterwards."""
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    model = W(1)
    with open_session(model, sgd(model), control, control=True) as session:
        session.backward(session.model([0.5]))
        session.step()
        weight = session.full_weights()["w"].item()
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return weight, sorted(changed - {"TORCHELASTIC_USE_AGENT_STORE"})


def config_of(text: str) -> dict[str, Any]:
    from shardkit_deepspeed import _control

    from shardkit._options import typed_options
    from shardkit._registry import describe

    strategy = Strategy.parse(text)
    return _control.config_of(strategy, typed_options(describe("deepspeed"), strategy.options))


@arms("deepspeed")
def test_deepspeed_is_told_what_was_asked_for_and_no_more(control: str) -> None:
    least = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    assert config_of(control) == least
    assert config_of("deepspeed:stage=0,accumulate=3,max_grad_norm=0.5") == {
        **least,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0},
    }
    assert config_of("deepspeed:stage=3,offload_optimizer=cpu,offload_parameters=cpu,prefetch_bucket_size=7") == {
        **least,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_prefetch_bucket_size": 7,
        },
    }


def refusals(control: str, case: str, directory: str) -> tuple[str, str]:
    model = W(1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case == "state":
        model([1.0]).backward()
        optimizer.step()
    try:
        with open_session(model, None if case == "evaluation" else optimizer, control, control=True) as session:
            if case == "weights":
                for window in session.windows([torch.ones(1), torch.ones(1)], weight=lambda batch: 3.0):
                    for batch in window:
                        session.backward(session.model(batch.tolist()))
                        session.step()
            elif case == "uneven":
                for window in session.windows([torch.ones(1)] * (3 - session.rank)):
                    for batch in window:
                        session.backward(session.model(batch.tolist()))
                        session.step()
            elif case == "save":
                session.backward(session.model([1.0]))
                session.step()
                session.save(directory)
            elif case == "evaluate":
                with session.evaluate():
                    pass
    except ShardkitError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


LACKS = {
    "evaluation": ("InputError", "a control trains"),
    "state": ("InputError", "begins with a fresh optimizer"),
    "weights": ("UnsupportedError", "can't give"),
    "uneven": ("UnsupportedError", "can't give"),
    "save": ("UnsupportedError", "its state isn't saved"),
}


@arms("deepspeed:stage=1", "deepspeed:stage=3", *FAIRSCALE, "zero")
@pytest.mark.parametrize("case", LACKS)
def test_what_a_control_lacks_it_refuses_on_every_rank(control: str, case: str, tmp_path: Path) -> None:
    text = f"{control}{',' if ':' in control else ':'}accumulate=2" if case == "uneven" else control
    kind, words = LACKS[case]
    for found in run(refusals, text, case, str(tmp_path), timeout=60):
        assert found[0] == kind
        assert words in found[1]


@arms("deepspeed:stage=3")
def test_a_control_at_stage_3_refuses_to_evaluate_at_will(control: str) -> None:
    for kind, words in run(refusals, control, "evaluate", "", timeout=60):
        assert kind == "UnsupportedError"
        assert "the same number of times" in words


@arms("deepspeed:config=there.json", "deepspeed:half_weights=true,precision=bf16", "deepspeed:precision=fp16")
def test_what_a_control_of_deepspeed_does_not_say_it_refuses(control: str) -> None:
    kind, words = run(refusals, control, "", "", processes=1, timeout=60)[0]
    assert kind == "UnsupportedError"
    assert "the control of backend 'deepspeed'" in words


def test_a_plugin_without_a_control_says_so() -> None:
    model = W(1)
    with pytest.raises(UnsupportedError, match=r"backend 'ddp' has no control"):
        open_session(model, sgd(model), "ddp", control=True)
    # And nothing of it stays behind.
    with shardkit.prepare(model, sgd(model), "ddp") as session:
        session.backward(session.model([1.0]))
        assert session.step()


class Theirs:
    """A backend as somebody else would write it."""

    def __init__(self, control: Any = None, **declared: Any) -> None:
        self._control = control
        self._declared = declared

    @hookimpl
    def shardkit_describe(self) -> Backend:
        return Backend(name="theirs", summary="", variants=(Variant(strategy="theirs", summary=""),), **self._declared)

    @hookimpl
    def shardkit_prepare(self) -> Any:
        raise AssertionError("a control was asked for")

    @hookimpl
    def shardkit_control(self, model: nn.Module) -> Any:
        return self._control


@pytest.fixture
def _clean_registry() -> Iterator[None]:
    before = set(_manager().get_plugins())
    yield
    for plugin in set(_manager().get_plugins()) - before:
        _manager().unregister(plugin)
    _registered().clear()


@pytest.mark.usefixtures("_clean_registry")
def test_a_control_that_is_no_engine_is_the_plugins_error() -> None:
    shardkit.register(Theirs("seven"), "theirs")
    model = W(1)
    with pytest.raises(PluginError, match=r"shardkit_control of plugin 'theirs' .* returns 'seven', which is no"):
        open_session(model, sgd(model), "theirs", control=True)


@pytest.mark.usefixtures("_clean_registry")
def test_any_version_lifts_the_check_on_the_version() -> None:
    installed = importlib.metadata.version("torch")
    shardkit.register(Theirs("seven", library="torch", requires="torch>=1000"), "theirs")
    model = W(1)
    with pytest.raises(MissingLibraryError, match=f"needs torch>=1000, not {installed}".replace("+", r"\+")):
        open_session(model, sgd(model), "theirs", control=True)
    with pytest.raises(PluginError, match="returns 'seven'"):
        open_session(model, sgd(model), "theirs", control=True, any_version=True)
    with pytest.raises(InputError, match="a control trains"):
        open_session(model, None, "theirs", control=True, any_version=True)


@pytest.mark.usefixtures("_clean_registry")
def test_any_version_wants_the_library_to_be_there() -> None:
    shardkit.register(Theirs("seven", library="nowhere_at_all", requires="nowhere_at_all>=1"), "theirs")
    model = W(1)
    with pytest.raises(MissingLibraryError, match="needs nowhere_at_all, which is not installed"):
        open_session(model, sgd(model), "theirs", control=True, any_version=True)


def test_the_hook_is_told_of_in_the_page_on_hooks() -> None:
    page = Path(__file__).parents[2] / "docs" / "hooks.md"
    assert "## `shardkit_control(" in page.read_text()
