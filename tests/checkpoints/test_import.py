"""Training goes on from other libraries' checkpoints as it would have gone on there; what can't is refused by name."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import Tensor, nn

import shardkit
from shardkit import Imported, Source, hookimpl
from shardkit.checkpoints import import_checkpoint
from shardkit.checkpoints._import import read
from shardkit.checkpoints._read import Reader
from shardkit.cli import main
from shardkit.errors import CheckpointError, InputError, PluginError
from shardkit.testing import run
from shardkit.testing.cases._models import step
from tests.checkpoints import _libraries as libraries
from tests.checkpoints._libraries import Chain, Odd, adamw

# Float32 round-off of four steps; of two, where each library sums in another order.
TOLERANCE = 2e-6
ANYWHERE = ("ddp", "fairscale", "deepspeed:stage=1", "deepspeed:stage=3")

Case = tuple[int, str, bool]


def assert_goes_on(found: list[Any], expected: list[Any], tolerance: float = TOLERANCE) -> None:
    """Raise unless all ranks' losses, averaged, and the weights are those of the run that was never interrupted."""
    mean, other = (
        [sum(losses) / len(losses) for losses in zip(*(one[0] for one in ranks), strict=True)]
        for ranks in (found, expected)
    )
    assert mean == pytest.approx(other, rel=tolerance, abs=tolerance)
    weights, reference = found[0][1], expected[0][1]
    assert sorted(weights) == sorted(reference)
    for name, value in reference.items():
        torch.testing.assert_close(
            weights[name].float(), value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def deepspeed_runs(folder: Path, cases: list[Case], processes: int, **settings: Any) -> dict[Case, list[Any]]:
    ranks = run(libraries.deepspeed, folder, cases, settings, processes=processes)
    return {case: [rank[case] for rank in ranks] for case in cases}


@pytest.fixture(scope="module")
def deepspeed(folder: Path) -> dict[Case, list[Any]]:
    """Give what each rank got with each stage in a run that was never interrupted."""
    pytest.importorskip("deepspeed")
    return deepspeed_runs(folder, [(stage, "adamw", False) for stage in range(4)], 2)


@pytest.fixture(scope="module")
def fairscale(folder: Path) -> list[Any]:
    pytest.importorskip("fairscale")
    return run(libraries.fairscale, folder)


@pytest.fixture(scope="module")
def ddp(folder: Path) -> list[Any]:
    return run(libraries.ddp, folder)


@pytest.fixture(scope="module")
def fsdp(folder: Path) -> list[Any]:
    return run(libraries.fsdp, folder)


@pytest.fixture(scope="module")
def zero(folder: Path) -> list[Any]:
    return run(libraries.zero, folder)


def built(number: bool = False) -> dict[str, Any]:
    """Return a model and its optimizer, as they were built when the run began."""
    model = Odd(number)
    return {"model": model, "optimizer": adamw(model)}


def go_on(
    path: Path, strategies: tuple[str, ...], expected: list[Any], processes: int, *, model: str, **settings: Any
) -> None:
    kinds = {"optimizer": "adamw", "half": False, "tolerance": TOLERANCE, **settings}
    wanted = [(str(path), strategy, model, kinds["optimizer"], kinds["half"]) for strategy in strategies]
    ranks = run(libraries.resumed, wanted, processes=processes)
    for number, strategy in enumerate(strategies):
        try:
            assert_goes_on([rank[number] for rank in ranks], expected, kinds["tolerance"])
        except AssertionError as error:
            raise AssertionError(f"{strategy} on {processes} ranks: {error}") from None


@pytest.mark.parametrize("stage", range(4))
def test_deepspeeds_checkpoint_goes_on_under_its_own_and_other_strategies(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path, stage: int
) -> None:
    path = import_checkpoint(folder / f"stage-{stage}-adamw", tmp_path, **(built() if stage == 0 else {}))
    assert path == tmp_path / "step-00000002"
    others = ("ddp", "fairscale", "deepspeed:stage=3", "deepspeed:stage=1")[stage]
    go_on(path, (f"deepspeed:stage={stage}", others), deepspeed[stage, "adamw", False], 2, model="Odd")


def test_deepspeeds_checkpoint_of_two_ranks_goes_on_on_one_and_on_three(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path
) -> None:
    path = import_checkpoint(folder / "stage-3-adamw", tmp_path)
    go_on(path, ("ddp",), deepspeed[3, "adamw", False], 1, model="Odd")
    go_on(path, ("deepspeed:stage=2",), deepspeed[3, "adamw", False], 3, model="Odd")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_deepspeeds_checkpoints_of_any_world_size_go_on_everywhere(
    tmp_path: Path, processes: int, optimizer: str
) -> None:
    pytest.importorskip("deepspeed")
    cases = [(stage, optimizer, False) for stage in range(4)]
    expected = deepspeed_runs(tmp_path, cases, processes)
    for case in cases:
        model = Odd()
        how = {"model": model, "optimizer": getattr(libraries, optimizer)(model)} if case[0] == 0 else {}
        path = import_checkpoint(tmp_path / libraries.name_of(*case), tmp_path / f"imported-{case[0]}", **how)
        for size in (1, 2, 3):
            go_on(path, ANYWHERE, expected[case], size, model="Odd", optimizer=optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_without_dimensions_keeps_its_shape(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path, stage: int
) -> None:
    # DeepSpeed 0.19.8 can't broadcast one at its start; earlier ones could.
    shutil.copytree(folder / f"stage-{stage}-adamw" / "global_step2", tmp_path / "run")
    for path in (tmp_path / "run").glob("*model_states.pt"):
        content = torch.load(path)
        content["param_shapes"][1]["scale"] = torch.Size([])
        content["module"]["scale"] = content["module"]["scale"].reshape(()) if stage == 2 else torch.empty(0)
        torch.save(content, path)
    path = import_checkpoint(tmp_path / "run", tmp_path / "c")
    expected = [
        (losses, {**weights, "scale": weights["scale"].reshape(())})
        for losses, weights in deepspeed[stage, "adamw", False]
    ]
    go_on(path, ("ddp",), expected, 2, model="Odd with a number")


def test_deepspeeds_own_adams_count_steps_elsewhere_and_scale_losses(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path
) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    shutil.copytree(folder / "stage-1-adamw" / "global_step2", tmp_path / "run")
    for path in (tmp_path / "run").glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        state = content["optimizer_state_dict"]
        state |= {
            "loss_scaler": DynamicLossScaler(512.0, 2.0, 1000, 1.0, 1, False, dtype=torch.float16),
            "dynamic_loss_scale": True,
        }
        for entries in state["base_optimizer_state"]["state"].values():
            del entries["step"]
        for group in state["base_optimizer_state"]["param_groups"]:
            group |= {"step": 2, "bias_correction": True}
        torch.save(content, path)
    path = import_checkpoint(tmp_path / "run", tmp_path / "c")
    assert json.loads((path / "checkpoint.json").read_text())["scaler"] == {"scale": 512.0, "growth_tracker": 0}
    go_on(path, ("ddp",), deepspeed[1, "adamw", False], 2, model="Odd")


@pytest.mark.parametrize(("stage", "settings"), [(2, {"round_robin_gradients": True}), (3, {"sub_group_size": 20})])
def test_deepspeeds_own_orders_of_parameters_are_followed(tmp_path: Path, stage: int, settings: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    case = (stage, "adamw", False)
    expected = deepspeed_runs(tmp_path, [case], 2, **settings)
    path = import_checkpoint(tmp_path / libraries.name_of(*case), tmp_path / "imported")
    go_on(path, ("ddp",), expected[case], 2, model="Odd")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_half_precision_goes_on_from_its_float32_masters(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    case = (stage, "adamw", True)
    expected = deepspeed_runs(tmp_path, [case], 2)
    path = import_checkpoint(tmp_path / libraries.name_of(*case), tmp_path / "imported")
    with Reader(path) as reader:
        assert reader.specs("weights.safetensors")["inp.weight"].dtype is torch.float32
    go_on(path, (f"deepspeed:stage={stage}",), expected[case], 2, model="Odd", half=True, tolerance=1e-6)


def test_fairscales_consolidated_state_goes_on(fairscale: list[Any], folder: Path, tmp_path: Path) -> None:
    path = import_checkpoint(folder / "fairscale.pt", tmp_path, **built(number=True))
    go_on(path, ("fairscale", "deepspeed:stage=2"), fairscale, 2, model="Odd with a number")
    go_on(path, ("ddp",), fairscale, 1, model="Odd with a number")


@pytest.mark.parametrize("source", ["ddp.pt", "dcp"])
def test_torchs_own_checkpoints_go_on(ddp: list[Any], folder: Path, tmp_path: Path, source: str) -> None:
    path = import_checkpoint(folder / source, tmp_path, **built(number=True))
    go_on(path, ("ddp", "deepspeed:stage=3"), ddp, 2, model="Odd with a number")


def assert_holds_the_same(path: Path, other: Path) -> None:
    contents = []
    for one in (path, other):
        with Reader(one) as reader:
            files = ("weights.safetensors", "optimizer.safetensors")
            tensors = {(file, name): reader.read(file, name) for file in files for name in reader.specs(file)}
            found = reader.manifest["optimizer"]
            groups = [(sorted(group["parameters"]), sorted(group["settings"].items())) for group in found["groups"]]
            contents.append((tensors, sorted(groups), found["state"], reader.manifest["step"]))
    (tensors, *facts), (others, *other_facts) = contents
    assert sorted(tensors) == sorted(others)
    assert all(torch.equal(value, others[key]) for key, value in tensors.items())
    assert facts == other_facts


@pytest.mark.parametrize("source", ["dcp", "dcp-flat", "dcp-numbers"])
def test_all_forms_of_torchs_folders_hold_what_its_file_does(
    ddp: list[Any], folder: Path, tmp_path: Path, source: str
) -> None:
    assert_holds_the_same(
        *(import_checkpoint(folder / one, tmp_path / one, **built(number=True)) for one in ("ddp.pt", source))
    )


def test_the_collected_state_of_a_zero_redundancy_optimizer_goes_on(
    zero: list[Any], folder: Path, tmp_path: Path
) -> None:
    path = import_checkpoint(folder / "zero.pt", tmp_path, **built(number=True))
    go_on(path, ("zero", "deepspeed:stage=2"), zero, 2, model="Odd with a number")
    go_on(path, ("ddp",), zero, 1, model="Odd with a number")


def test_a_folder_of_parameters_in_parts_goes_on(fsdp: list[Any], folder: Path, tmp_path: Path) -> None:
    path = import_checkpoint(folder / "fsdp", tmp_path)
    go_on(path, ("fsdp", "ddp", "deepspeed:stage=1"), fsdp, 2, model="Chain")
    go_on(path, ("fairscale",), fsdp, 3, model="Chain")


def test_a_file_of_parameters_made_whole_holds_what_the_folder_of_their_parts_does(
    fsdp: list[Any], folder: Path, tmp_path: Path
) -> None:
    assert_holds_the_same(*(import_checkpoint(folder / one, tmp_path / one) for one in ("fsdp", "fsdp.pt")))


def test_what_else_a_checkpoint_holds_comes_back_as_the_users_state(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path
) -> None:
    path = import_checkpoint(folder / "stage-1-adamw", tmp_path)
    model = Odd()
    with shardkit.prepare(model, adamw(model), "ddp") as session:
        assert session.load(tmp_path) == {"epoch": 7}
        assert session.steps == 2
        # Halved twice by the user's own schedule.
        assert [group["lr"] for group in session.optimizer.param_groups] == [0.0025, 0.0075]
        assert [group["weight_decay"] for group in session.optimizer.param_groups] == [0.1, 0.0]
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert (manifest["world_size"], manifest["imported"]["kind"]) == (2, "DeepSpeed checkpoint of ZeRO stage 1")


# Names.


class Same(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(rows)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 2) -> nn.Module:
    for index in range(first, first + steps):
        optimizer.zero_grad()
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(index))
        model(rows).square().mean().backward()
        optimizer.step()
    return model


def saved(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    return path


def goes_on(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, expected: nn.Module) -> None:
    """Go on for two steps from two, in one process."""
    with shardkit.prepare(model, optimizer, "ddp") as session:
        session.load(path)
        for index in (2, 3):
            rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(index))
            step(session, session.model(rows).square().mean())
        weights = session.full_weights()
    for name, value in expected.state_dict().items():
        assert torch.equal(weights[name], value), name


def reversed_adam(model: nn.Module, **settings: Any) -> torch.optim.Adam:
    return torch.optim.Adam(list(model.parameters())[::-1], lr=0.01, **settings)


@pytest.mark.parametrize("count", [int, float])
def test_steps_that_are_counted_in_numbers_as_before_torch_1_12_go_on(tmp_path: Path, count: Any) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["step"] = count(values["step"])
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    path = import_checkpoint(tmp_path / "run.pt", tmp_path, names="order", optimizer_class="Adam")
    trained(model, optimizer, 2)
    other = Same()
    goes_on(path, other, torch.optim.Adam(other.parameters(), lr=0.01), model)


def test_names_are_asked_for_where_the_numbers_could_mean_several(tmp_path: Path) -> None:
    model = Same()
    optimizer = reversed_adam(model)
    trained(model, optimizer)
    source = saved(tmp_path / "run.pt", model, optimizer)
    with pytest.raises(CheckpointError, match=r"of shape \(4, 4\) the model has 'a.weight', 'b.weight': hand over .*"):
        import_checkpoint(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    expected = trained(model, optimizer, first=2)
    fresh = Same()
    by_model = import_checkpoint(source, tmp_path / "model", model=fresh, optimizer=reversed_adam(fresh))
    by_names = import_checkpoint(source, tmp_path / "names", names=[["b.weight", "a.weight"]])
    for path in (by_model, by_names):
        again = Same()
        goes_on(path, again, reversed_adam(again), expected)


def test_an_order_that_was_asked_for_is_the_models_own(tmp_path: Path) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer)
    source = saved(tmp_path / "run.pt", model, optimizer)
    path = import_checkpoint(source, tmp_path / "c", names="order", optimizer_class="Adam")
    expected = trained(model, optimizer, first=2)
    again = Same()
    goes_on(path, again, torch.optim.Adam(again.parameters(), lr=0.01), expected)
    other = Same()
    wrong = pytest.raises(CheckpointError, match="of the optimizer Adam, and this session's is AdamW")
    with shardkit.prepare(other, torch.optim.AdamW(other.parameters()), "ddp") as session, wrong:
        session.load(path)


def test_an_order_that_leaves_two_ways_is_refused(tmp_path: Path) -> None:
    model = Same()
    a, b = model.parameters()
    optimizer = torch.optim.Adam([{"params": [a]}, {"params": [b]}], lr=0.01)
    source = saved(tmp_path / "run.pt", trained(model, optimizer), optimizer)
    with pytest.raises(CheckpointError, match=r"number 0 of the optimizer could be '[ab].weight' or '[ab].weight'"):
        import_checkpoint(source, tmp_path / "c", names="order")


def test_shapes_that_fit_in_one_way_only_are_enough(tmp_path: Path) -> None:
    model = Chain()
    optimizer = torch.optim.Adam(list(model.parameters())[::-1], lr=0.01)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    found = read(Source(saved(tmp_path / "run.pt", model, optimizer)))
    path = import_checkpoint(tmp_path / "run.pt", tmp_path / "c")
    (group,) = json.loads((path / "checkpoint.json").read_text())["optimizer"]["groups"]
    assert group["parameters"] == ["three.weight", "two.weight", "one.bias", "one.weight"]
    assert found.optimizer is not None
    with Reader(path) as reader:
        state = optimizer.state[model.two.weight]["exp_avg"]
        assert torch.equal(reader.read("optimizer.safetensors", "two.weight/exp_avg"), state)


def test_names_in_the_groups_are_taken(tmp_path: Path) -> None:
    model = Same()
    optimizer = torch.optim.Adam(list(model.named_parameters())[::-1], lr=0.01)
    source = saved(tmp_path / "run.pt", trained(model, optimizer), optimizer)
    path = import_checkpoint(source, tmp_path / "c")
    expected = trained(model, optimizer, first=2)
    again = Same()
    goes_on(path, again, reversed_adam(again), expected)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["a.weight"]], "name 1 parameters in the groups of the optimizer, and its state in the source has 2"),
        ([["a.weight", "c"]], "has the parameter 'c', which the model in the source lacks; it has 'a.weight', 'b"),
        ([["a.weight", "a.weight"]], "has the parameter 'a.weight' twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, names: Any, message: str) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.parameters())
    source = saved(tmp_path / "run.pt", trained(model, optimizer), optimizer)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(source, tmp_path / "c", names=names)
    with pytest.raises(InputError, match="names is 'order', or a list"):
        import_checkpoint(source, tmp_path / "c", names={"a": 1})


def test_a_state_of_another_shape_than_its_parameter_is_refused(tmp_path: Path) -> None:
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    source = saved(tmp_path / "run.pt", model, optimizer)
    names = [[name for name, _ in model.named_parameters()][::-1]]
    with pytest.raises(CheckpointError, match=r"'three.weight' \(3, 5\) has a state of shape \(7, 8\)"):
        import_checkpoint(source, tmp_path / "c", names=names)


def test_a_model_that_is_not_the_sources_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    torch.save(Same().state_dict(), tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=r"the source has 'a.weight' \(4, 4\).* that the model that was handed"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "c", model=Chain())


def test_a_class_that_is_not_known_still_refuses_an_optimizer_without_its_settings(tmp_path: Path) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.parameters())
    source = saved(tmp_path / "run.pt", trained(model, optimizer), optimizer)
    path = import_checkpoint(source, tmp_path / "c", names="order")
    other = Same()
    with shardkit.prepare(other, torch.optim.SGD(other.parameters(), lr=1), "ddp") as session:
        with pytest.raises(CheckpointError, match=r"of an optimizer with 'amsgrad', 'betas'.*SGD doesn't have"):
            session.load(path)
        assert session.optimizer.param_groups[0]["lr"] == 1


def test_a_frozen_parameter_may_be_in_the_sessions_optimizer_or_not_and_a_trained_one_must(tmp_path: Path) -> None:
    def half_frozen() -> Same:
        model = Same()
        model.a.weight.requires_grad_(False)
        return model

    model = half_frozen()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path = import_checkpoint(
        saved(tmp_path / "run.pt", trained(model, optimizer), optimizer), tmp_path / "c", names="order"
    )
    expected = trained(model, optimizer, first=2)
    without = half_frozen()
    goes_on(path, without, torch.optim.Adam(without.b.parameters(), lr=0.01), expected)
    lacking = half_frozen()
    refused = pytest.raises(CheckpointError, match=r"the checkpoint has 'b.weight' \(4, 4\) that this session lacks")
    with shardkit.prepare(lacking, torch.optim.Adam(lacking.a.parameters()), "ddp") as session, refused:
        session.load(path)


# Files of torch.save.


@pytest.mark.parametrize("keys", [("state_dict", "optimizer"), ("model_state_dict", "optim"), ("net", "opt")])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_common_keys_and_prefixes_are_known(tmp_path: Path, keys: tuple[str, str], prefix: str) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    trained(model, optimizer)
    weights = OrderedDict((prefix + name, value) for name, value in model.state_dict().items())
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    torch.save({keys[0]: weights, keys[1]: state, "global_step": 5}, tmp_path / "run.pt")
    path = import_checkpoint(tmp_path / "run.pt", tmp_path / "c")
    assert path.name == "step-00000005"
    expected = trained(model, optimizer, first=2)
    again = Same()
    goes_on(path, again, torch.optim.Adam(again.parameters(), lr=0.01), expected)


def test_a_model_alone_is_for_sessions_without_an_optimizer(tmp_path: Path) -> None:
    torch.save(Same().state_dict(), tmp_path / "run.pt")
    path = import_checkpoint(tmp_path / "run.pt", tmp_path / "c", steps=40)
    assert path.name == "step-00000040"
    with shardkit.prepare(Same(), None, "ddp") as session:
        session.load(path)
        assert session.steps == 40
    model = Same()
    refused = pytest.raises(CheckpointError, match="the checkpoint has no optimizer")
    with shardkit.prepare(model, torch.optim.Adam(model.parameters()), "ddp") as session, refused:
        session.load(path)


def test_a_schedule_goes_on_from_the_users_state(tmp_path: Path) -> None:
    model = Same()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trained(model, optimizer)
    schedule.step()
    schedule.step()
    source = saved(tmp_path / "run.pt", model, optimizer, scheduler=schedule.state_dict())
    path = import_checkpoint(source, tmp_path / "c", names="order")
    again = Same()
    with shardkit.prepare(again, torch.optim.Adam(again.parameters(), lr=1.0), "ddp") as session:
        other = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, 0.5)
        state = session.load(path)
        assert state is not None
        other.load_state_dict(state["scheduler"])
        step(session, session.model(torch.ones(2, 4)).sum())
        other.step()
        assert session.optimizer.param_groups[0]["lr"] == 0.01 / 8


def test_tied_tensors_stay_one_and_others_stay_apart(tmp_path: Path) -> None:
    model = Same()
    model.b.weight = model.a.weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    source = saved(tmp_path / "run.pt", trained(model, optimizer), optimizer)
    manifest = json.loads((import_checkpoint(source, tmp_path / "c") / "checkpoint.json").read_text())
    assert manifest["model"]["aliases"] == {"b.weight": "a.weight"}
    differing = {"a.weight": torch.ones(4, 4), "b.weight": torch.zeros(4, 4)}
    torch.save(differing, tmp_path / "apart.pt")
    with pytest.raises(CheckpointError, match=r"'b.weight' and 'a.weight' are one tensor in the model, and differ"):
        import_checkpoint(tmp_path / "apart.pt", tmp_path / "c", model=model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, not a dictionary of state dicts"),
        ({"epoch": 3}, "has no model: its keys are 'epoch'"),
        ({"model": {"w": torch.ones(1)}, "net": {"w": torch.ones(1)}}, "more than one model: 'model', 'net'"),
        ({"model": {"w": torch.ones(1)}, "optimizer": {"lr": 0.1}}, "'optimizer' in .* isn't what torch.optim's"),
    ],
)
def test_a_file_without_one_model_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()


# Pickle.


class Malicious:
    """Makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def poisoned(tmp_path: Path, where: str) -> Path:
    bad = Malicious(tmp_path / "ran")
    model = Same()
    if where == "torch.save":
        torch.save({"model": model.state_dict(), "bad": bad}, tmp_path / "run.pt")
        return tmp_path / "run.pt"
    if where == "plain pickle":
        (tmp_path / "run.pt").write_bytes(pickle.dumps(bad))
        return tmp_path / "run.pt"
    if where == "metadata":
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
        (tmp_path / "run" / ".metadata").write_bytes(pickle.dumps(bad))
        return tmp_path / "run"
    if where == "distributed":
        dcp.save({"model": model.state_dict(), "bad": bad}, checkpoint_id=tmp_path / "run", no_dist=True)
        return tmp_path / "run"
    (tmp_path / "run").mkdir()
    state = {"module": model.state_dict(), "optimizer": None, "param_shapes": None, "bad": bad}
    torch.save(state, tmp_path / "run" / "mp_rank_00_model_states.pt")
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("where", ["torch.save", "plain pickle", "metadata", "distributed", "deepspeed"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, where: str) -> None:
    source = poisoned(tmp_path, where)
    shutil.rmtree(tmp_path / "ran", ignore_errors=True)
    told = {"plain pickle": "no file of torch.save", "metadata": "posix.mkdir, .* it isn't read"}
    with pytest.raises(CheckpointError, match=told.get(where, "needs posix.mkdir, which could run code")):
        import_checkpoint(source, tmp_path / "c")
    assert not (tmp_path / "ran").exists()


class Setting:
    """A harmless class of the user's own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting)

    __hash__ = None  # type: ignore[assignment]


def test_full_pickle_is_read_only_where_it_is_allowed_and_what_cannot_be_held_is_told(tmp_path: Path) -> None:
    torch.save({"model": Same().state_dict(), "args": Setting(), "epoch": 3}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=r"test_import.Setting, which could run .*allow_pickle=True, or --allow"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "c")
    path = import_checkpoint(tmp_path / "run.pt", tmp_path / "c", allow_pickle=True)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["imported"]["left_out"] == ["args"]
    assert manifest["state"] == {"epoch": 3}


# Damage.


def ruin(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-200])


def other_world(folder: Path) -> None:
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path)
    torch.save({**content, "dp_world_size": 1}, path)


def other_step(folder: Path) -> None:
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    for entries in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        entries["step"] += 1
    torch.save(content, path)


def other_weights(folder: Path) -> None:
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path)
    content["module"]["inp.weight"][0] += 1
    torch.save(content, path)


DAMAGE: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "a rank's optimizer is missing": (
        2,
        lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
        r"lacks zero_pp_rank_1_mp_rank_00_optim_states.pt, the optimizer's part of rank 1 of 2",
    ),
    "a rank's model is missing": (
        3,
        lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
        r"lacks zero_pp_rank_1_mp_rank_00_model_states.pt, the model's part of rank 1 of 2",
    ),
    "the model is missing": (
        1,
        lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(),
        r"lacks mp_rank_00_model_states.pt, which has the model",
    ),
    "a file is cut short": (
        1,
        ruin("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        r"zero_pp_rank_0_mp_rank_00_optim_states.pt' is damaged",
    ),
    "files of another world size": (1, other_world, r"has files of rank 1, and the model's file is of 1 ranks"),
    "files of different steps": (2, other_step, r"have other steps, \[2.0, 2.0\] and \[3.0, 3.0\]"),
    "other weights in the model's file": (1, other_weights, r"has other weights of 'inp.weight' in the optimizer's"),
    "model parallelism": (
        1,
        lambda folder: (folder / "mp_rank_01_model_states.pt").touch(),
        r"split over ranks \(model parallelism\), as 'mp_rank_01_model_states.pt' shows",
    ),
    "a pipeline": (1, lambda folder: (folder / "layer_00-model_states.pt").touch(), r"of a pipeline of layers"),
    "experts": (
        1,
        lambda folder: (folder / "layer_0_expert_0_mp_rank_00_model_states.pt").touch(),
        r"of a model with experts \(MoE\)",
    ),
    "universal": (1, lambda folder: (folder / "zero").mkdir(), r"a universal checkpoint: import the one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_of_deepspeeds_that_is_not_whole_or_not_plain_is_refused(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path, damage: str
) -> None:
    stage, harm, message = DAMAGE[damage]
    shutil.copytree(folder / f"stage-{stage}-adamw" / "global_step2", tmp_path / "run")
    import_checkpoint(tmp_path / "run", tmp_path / "whole")
    harm(tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "run", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_tag_that_is_not_there_is_named_with_those_that_are(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "stage-1-adamw", tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match=r"names the tag 'global_step9', and .*: it has 'global_step2'"):
        import_checkpoint(tmp_path / "run", tmp_path / "c")


def test_a_folder_of_torchs_that_is_not_whole_is_refused(fsdp: list[Any], folder: Path, tmp_path: Path) -> None:
    for name, message in (
        ("__1_0.distcp", "can't read .*__1_0.distcp"),
        (".metadata", r"its .metadata file is missing"),
    ):
        shutil.copytree(folder / "fsdp", tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(tmp_path / name, tmp_path / "c")
    shutil.copytree(folder / "fsdp", tmp_path / "inside" / "run")
    shutil.copy(folder / "fsdp" / "__0_0.distcp", tmp_path / "inside" / "_0.distcp")
    index = tmp_path / "inside" / "run" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match="points outside of it"):
        import_checkpoint(tmp_path / "inside" / "run", tmp_path / "c")
    shutil.copytree(folder / "fsdp", tmp_path / "short")
    ruin("__0_0.distcp")(tmp_path / "short")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp' is damaged: it ends within"):
        import_checkpoint(tmp_path / "short", tmp_path / "c")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is nothing to import at .*nowhere"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty' is no checkpoint that can be imported \(it is empty\)"):
        import_checkpoint(tmp_path / "empty", tmp_path / "c")
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"text' is damaged, or no file of torch.save"):
        import_checkpoint(tmp_path / "text", tmp_path / "c")
    torch.save(Same().state_dict(), tmp_path / "run.pt")
    path = import_checkpoint(tmp_path / "run.pt", tmp_path / "c")
    with pytest.raises(CheckpointError, match="holds a checkpoint of shardkit already"):
        import_checkpoint(path, tmp_path / "d")
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        import_checkpoint(tmp_path / "run.pt", path)


# The hook and the command line.


class Theirs:
    """A plugin whose library writes weights as a line of text."""

    @hookimpl
    def shardkit_describe(self) -> Any:
        return shardkit.Backend(name="theirs", summary="", variants=())

    @hookimpl
    def shardkit_prepare(self) -> Any:
        return None

    @hookimpl
    def shardkit_import(self, source: Source) -> Any:
        if source.path.suffix != ".theirs":
            return None
        text = source.path.read_text()
        if text == "wrong":
            return text
        return Imported(kind="theirs", weights={"w": torch.tensor([float(word) for word in text.split()])})


def test_a_plugin_reads_the_checkpoints_of_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit import _registry

    monkeypatch.setitem(_registry._registered(), "theirs", _registry.Claim("theirs", "a test", Theirs()))
    (tmp_path / "run.theirs").write_text("1 2.5")
    with Reader(import_checkpoint(tmp_path / "run.theirs", tmp_path / "c")) as reader:
        assert reader.read("weights.safetensors", "w").tolist() == [1.0, 2.5]
    (tmp_path / "run.theirs").write_text("wrong")
    with pytest.raises(
        PluginError, match=r"plugin 'theirs' .* returns 'wrong' from its shardkit_import, which returns Imported"
    ):
        import_checkpoint(tmp_path / "run.theirs", tmp_path / "c")


def test_the_command_line_imports_and_says_what_it_did(tmp_path: Path) -> None:
    model = Same()
    optimizer = reversed_adam(model)
    source = str(saved(tmp_path / "run.pt", trained(model, optimizer), optimizer))
    refused = CliRunner().invoke(main, ["import", source, str(tmp_path / "c")])
    assert refused.exit_code == 2
    assert "--workload" in refused.stderr
    (tmp_path / "names.json").write_text('[["b.weight", "a.weight"]]')
    done = CliRunner().invoke(main, ["import", source, str(tmp_path / "c"), "--names", str(tmp_path / "names.json")])
    assert done.exit_code == 0, done.output
    assert "step-00000002: file of torch.save, of a model and its optimizer, after 2 steps, 2 tensors" in done.stdout
    told = CliRunner().invoke(
        main,
        ["import", source, str(tmp_path / "d"), "--names", "order", "--json", "--optimizer", "Adam", "--steps", "9"],
    )
    found = json.loads(told.stdout)
    assert (found["path"], found["step"]) == (str(tmp_path / "d" / "step-00000009"), 9)
    assert json.loads((Path(found["path"]) / "checkpoint.json").read_text())["optimizer"]["class"] == "Adam"


def test_a_workload_tells_the_command_line_the_names(tmp_path: Path) -> None:
    made = shardkit.workloads.load("mlp")
    made.loss(made.model, next(made.batches(4))).backward()
    made.optimizer.step()
    source = str(saved(tmp_path / "run.pt", made.model, made.optimizer))
    done = CliRunner().invoke(main, ["import", source, str(tmp_path / "c"), "--workload", "mlp"])
    assert done.exit_code == 0, done.output
    assert "their names are from the optimizer that was handed over" in done.stdout


def test_importing_loads_no_library_of_a_backend(
    deepspeed: dict[Case, list[Any]], folder: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from shardkit.checkpoints import import_checkpoint\n"
        f"import_checkpoint({str(folder / 'stage-2-adamw')!r}, {str(tmp_path)!r})\n"
        "assert not {'deepspeed', 'fairscale'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
