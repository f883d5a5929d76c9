"""Plans: what each strategy holds, by hand; what fits; what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import shardkit
from shardkit import Footprint, ModelSize, Stepped, Strategy
from shardkit.cli import main
from shardkit.errors import InputError, StrategyError
from shardkit.planner import outputs
from shardkit.planner._declared import DeclaredFootprint
from shardkit.planner._optimizer import Cost
from shardkit.planner._plan import Outcome, Task, rows
from shardkit.planner._profile import Event, Profile
from shardkit.planner._results import Plan, Row
from shardkit.planner._simulate import simulate
from shardkit.workloads import Workload

SIZE = 1024
MATRIX = SIZE * SIZE * 4


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(8)])

    def batches(size: int) -> Iterator[Tensor]:
        return repeat(torch.ones(size, SIZE))

    return Workload(model, torch.optim.AdamW(model.parameters()), lambda net, batch: net(batch).mean(), batches)


def plan(*strategies: str, memory: int | None = None, processes: int = 2, batch: int | None = None) -> list[Row]:
    task = Task(tuple(Strategy.parse(text) for text in strategies), memory, processes, batch, "cpu")
    found = rows(workload, task)
    assert isinstance(found, Outcome), found
    return found.rows


def shape(world_size: int) -> ModelSize:
    from shardkit._footprint import ParameterSize

    return ModelSize(
        (ParameterSize("a", (100,), 4, True, True), ParameterSize("b", (10, 10), 4, True, True)), world_size
    )


PROFILE = Profile(
    1,
    (
        Event("forward", ("a",), 0, 10, 50),
        Event("forward", ("b",), 0, 40, 90),
        Event("backward", (), 0, 80, 85),
        Event("ready", ("b",), 400, 60, 70),
        Event("ready", ("a",), 400, 0, 0),
    ),
    10,
)
OWNERS = {"a": ("a",), "b": ("b",)}


@dataclasses.dataclass
class Whole(Footprint):
    """Holds all of it, and 1000 bytes while it steps."""

    def __post_init__(self) -> None:
        self.held.parameters = 800

    def stepped(self) -> Sequence[Stepped]:
        return []

    def step(self) -> int:
        self.held.gradients = 0
        return 1000


def test_the_peak_is_where_most_is_held_at_once() -> None:
    found = simulate(Whole(shape(1)), PROFILE, Cost(1600, 30), OWNERS, extra=7, micro_batches=1)
    assert found.moment == "step"
    assert (found.parameters, found.gradients, found.optimizer, found.buffers) == (807, 800, 1600, 1000)
    assert found.total == 807 + 800 + 1600 + 1000 + found.activations


def test_gradients_of_an_earlier_micro_batch_are_there_throughout_the_next() -> None:
    one = simulate(Whole(shape(1)), PROFILE, Cost(0, 0), OWNERS, extra=0, micro_batches=1)
    two = simulate(Whole(shape(1)), PROFILE, Cost(0, 0), OWNERS, extra=0, micro_batches=2)
    assert one.total == two.total == 800 + 800 + 1000 + 10, "at the step they are the same"

    class Quiet(Whole):
        def step(self) -> int:
            self.held.gradients = 0
            return 0

    one = simulate(Quiet(shape(1)), PROFILE, Cost(0, 0), OWNERS, extra=0, micro_batches=1)
    two = simulate(Quiet(shape(1)), PROFILE, Cost(0, 0), OWNERS, extra=0, micro_batches=2)
    assert one.total == 800 + 800 + 10
    assert two.total == 800 + 800 + 90, "the second forward has the first's gradients beside it"


def test_what_a_variant_declares_to_be_sharded_is_divided_by_the_ranks() -> None:
    def peak(world_size: int, *shards: str) -> int:
        made = DeclaredFootprint(shape(world_size), shards=frozenset(shards))
        return made.held.parameters

    assert peak(4, "parameters") == 200
    assert peak(4, "optimizer") == 800
    stepped = DeclaredFootprint(shape(4), shards=frozenset({"optimizer"})).stepped()
    assert [item.shape for item in stepped] == [(25,), (25,)]


def test_plain_data_parallel_holds_the_model_its_gradients_and_two_states() -> None:
    (row,) = plan("ddp", batch=1)
    assert row.parameters == 8 * MATRIX
    assert row.optimizer == pytest.approx(16 * MATRIX, rel=1e-3)
    assert row.peak >= 32 * MATRIX


def test_the_peak_of_one_more_than_the_largest_batch_is_above_the_limit() -> None:
    memory = 300 * 2**20
    for row in plan("ddp", "fairscale", "deepspeed:stage=2", "deepspeed:stage=3", memory=memory):
        assert row.status == "fits"
        assert row.largest is not None
        assert row.estimate(row.largest) <= memory < row.estimate(row.largest + 1)


def test_more_ranks_hold_less_each_where_something_is_sharded() -> None:
    for text in ("deepspeed:stage=1", "deepspeed:stage=2", "deepspeed:stage=3", "fairscale"):
        two, many = (plan(text, processes=count, batch=1)[0] for count in (2, 4096))
        assert many.optimizer < two.optimizer, text
        assert many.peak < two.peak, text


def test_what_does_not_fit_says_what_is_short() -> None:
    (row,) = plan("ddp", memory=20 * MATRIX)
    assert row.status == "short"
    assert row.largest == 0
    assert row.short == row.peak - 20 * MATRIX
    assert "optimizer 64 MiB" in outputs.shortage(row)


def row_of(strategy: str, *, speed: float | None, largest: int, peak: int = 1) -> Row:
    status = "fits" if largest else "short"
    return Row(strategy, "fp32", status, batch=1, peak=peak, speed=speed, largest=largest)  # type: ignore[arg-type]


def test_the_fastest_that_fits_is_taken_and_its_reason_said() -> None:
    found = [
        row_of("fast", speed=1.0, largest=0, peak=9),
        row_of("slow", speed=0.5, largest=8, peak=2),
        row_of("middle", speed=0.8, largest=3, peak=3),
        row_of("unknown", speed=None, largest=50),
    ]
    made = Plan({"memory": 5, "batch_size": None}, {}, 0, found)
    assert made.fastest is found[2]
    assert "fast would be faster and don't fit" in outputs.why(made)
    assert Plan({"memory": 5, "batch_size": 4}, {}, 0, found).fastest is found[1]
    assert Plan({"memory": 5, "batch_size": 60}, {}, 0, found).fastest is None


def test_a_precision_that_a_backend_does_not_declare_is_refused_in_its_row() -> None:
    made = shardkit.plan("mlp", strategies=["ddp"], precisions=["fp32", "bf16"], memory="64MiB")
    assert [(row.strategy, row.precision) for row in made.rows] == [("ddp", "fp32"), ("ddp:precision=bf16", "bf16")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "24 gigs"}, "24 gigs"),
        ({"memory": -1}, "-1"),
        ({"processes": 0}, "processes is at least 1, not 0"),
        ({"precisions": ["fp8"]}, "fp8"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_bad_numbers_are_refused_at_once(given: dict[str, object], said: str) -> None:
    with pytest.raises((InputError, StrategyError), match=said):
        shardkit.plan("mlp", **given)  # type: ignore[arg-type]


def test_a_workload_that_ignores_the_size_is_refused() -> None:
    def stubborn() -> Workload:
        made = workload()
        return dataclasses.replace(made, batches=lambda size: repeat(torch.ones(5, SIZE)))

    found = rows(stubborn, Task((Strategy("ddp"),), None, 2, None, "cpu"))
    assert isinstance(found, InputError)
    assert "yields 5 samples" in str(found)


def test_a_model_that_asks_for_a_number_says_that_it_must_be_measured() -> None:
    def asking() -> Workload:
        made = workload()

        def loss(net: nn.Module, batch: Tensor) -> Tensor:
            out: Tensor = net(batch).mean()
            return out if out.item() > 0 else -out

        return dataclasses.replace(made, loss=loss)

    found = rows(asking, Task((Strategy("ddp"),), None, 2, None, "cpu"))
    assert isinstance(found, InputError)
    assert "asks a tensor for its value" in str(found)
    assert "test_plan.py, line" in str(found)


def test_a_workload_whose_making_needs_numbers_is_made_once_for_real_and_says_so() -> None:
    def needing() -> Workload:
        made = workload()
        assert made.model[0].weight.sum().item() != 0  # type: ignore[index]
        return made

    found = rows(needing, Task((Strategy("ddp"),), None, 2, 1, "cpu"))
    assert isinstance(found, Outcome)
    assert "built with memory" in found.notes[0]
    (plain,) = plan("ddp", batch=1)
    assert found.rows[0].peak == plain.peak


def test_the_command_says_it_as_json_and_draws_it(tmp_path: Path) -> None:
    arguments = ["plan", "mlp", "--memory", "64MiB", "--strategies", "ddp,fairscale", "--precisions", "fp32", "--json"]
    done = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {row["strategy"] for row in told["rows"]} == {"ddp", "fairscale"}
    assert told["settings"]["memory"] == 64 * 2**20
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "plan.json").read_text()) == told


def test_the_command_ends_with_1_where_nothing_fits() -> None:
    done = CliRunner().invoke(main, ["plan", "mlp", "--memory", "1KiB", "--strategies", "ddp", "--precisions", "fp32"])
    assert done.exit_code == 1
    assert "nothing fits: ddp needs least" in done.stdout


def test_planning_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    shardkit.plan("mlp", strategies=["ddp"], precisions=["fp32"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_broken_loss_is_told_as_what_it_is_with_its_place() -> None:
    def broken() -> Workload:
        made = workload()

        def loss(net: nn.Module, batch: Tensor) -> Tensor:
            raise ValueError("boom")

        return dataclasses.replace(made, loss=loss)

    found = rows(broken, Task((Strategy("ddp"),), None, 2, None, "cpu"))
    assert isinstance(found, InputError)
    assert "raises ValueError: boom" in str(found)
    assert "test_plan.py, line" in str(found)


def test_batches_that_end_are_refused() -> None:
    def ending() -> Workload:
        return dataclasses.replace(workload(), batches=lambda size: iter([torch.ones(size, SIZE)]))

    found = rows(ending, Task((Strategy("ddp"),), None, 2, None, "cpu"))
    assert isinstance(found, InputError)
    assert "ends after 1 batch: it is endless" in str(found)


@pytest.mark.parametrize("text", ["nope", "ddp:foo=3"])
def test_a_wrong_strategy_is_a_wrong_question(text: str) -> None:
    done = CliRunner().invoke(main, ["plan", "mlp", "--memory", "1GiB", "--strategies", text])
    assert done.exit_code == 2
    assert "Error: " in done.stderr


def test_of_equally_fast_strategies_the_larger_batch_is_taken() -> None:
    found = [row_of("one", speed=1.0, largest=3, peak=4), row_of("other", speed=1.0, largest=5, peak=5)]
    assert Plan({"memory": 5, "batch_size": None}, {}, 0, found).fastest is found[1]


def test_a_file_of_a_strategy_is_planned_as_every_command_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "strategy.json"
    file.write_text('{"backend": "ddp", "accumulate": 2}')
    made = shardkit.plan("mlp", strategies=[str(file)], precisions=["fp32"])
    assert [row.strategy for row in made.rows] == ["ddp:accumulate=2"]
