"""What the planner counts, against sizes worked out by hand and against real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardkit.planner._ledger import Ledger
from shardkit.planner._optimizer import Stepper
from shardkit.planner._profile import Profile, Subject
from shardkit.workloads import Workload

WIDE, HIDDEN = 24, 4096
FLOAT = 4
PAGES = 3 * 4096


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def workload() -> Workload:
    made = model()

    def batches(size: int) -> Iterator[Tensor]:
        return repeat(torch.ones(size, WIDE))

    return Workload(made, torch.optim.AdamW(made.parameters()), lambda net, batch: net(batch).mean(), batches)


def moment(profile: Profile, kind: str, name: str = "") -> tuple[int, int]:
    event = next(event for event in profile.events if event.kind == kind and (not name or name in event.names))
    return event.live, event.high


def test_the_ledger_counts_a_tensor_from_its_making_to_its_end_and_shared_memory_once() -> None:
    with Ledger() as ledger:
        one = torch.zeros(10)
        view = one[:5]
        two = one + 1
        assert ledger.now == 2 * 10 * FLOAT
        del one
        assert ledger.now == 2 * 10 * FLOAT, "the view holds it"
        del view, two
    assert ledger.now == 0
    assert ledger.high == 2 * 10 * FLOAT


def test_the_forward_holds_what_the_backward_needs() -> None:
    subject = Subject(workload, device="cpu")
    batch = 100
    profile = subject.profile(batch, "fp32")
    data, hidden, out = batch * WIDE * FLOAT, batch * HIDDEN * FLOAT, batch * FLOAT
    live, high = moment(profile, "forward", "0.weight")
    # A large block is whole pages.
    assert data <= live <= data + PAGES
    assert data + 2 * hidden <= high <= data + 2 * hidden + PAGES, "before ReLU's input is freed"
    live, _ = moment(profile, "backward")
    # The batch, what ReLU returned, and the loss, a number; mean needs no values of what it sums.
    assert data + hidden + FLOAT <= live <= data + hidden + out + FLOAT + PAGES


def test_gradients_are_no_activations_once_they_are_there() -> None:
    subject = Subject(workload, device="cpu")
    profile = subject.profile(100, "fp32")
    sizes = {event.names[0]: event.nbytes for event in profile.events if event.kind == "ready"}
    assert sizes == {name: value.nbytes for name, value in model().named_parameters()}
    data = 100 * WIDE * FLOAT
    assert profile.events[-1].live <= data + 100 * HIDDEN * FLOAT, "no gradient is left in it"


def test_the_curve_of_a_real_pass_is_that_of_a_pass_without_memory() -> None:
    subject = Subject(workload, device="cpu")
    made, batch = model(), torch.ones(100, WIDE)
    ledger = Ledger(cpu=True)
    for value in [*made.parameters(), batch]:
        ledger.leave_out(value)
    with ledger:
        loss = made(batch).mean()
        real = ledger.now
    loss.backward()
    planned, _ = moment(subject.profile(100, "fp32"), "backward")
    assert planned == real + batch.nbytes


def test_planning_allocates_nothing_of_the_model() -> None:
    made = []

    def large() -> Workload:
        net = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(64)])  # 64 GiB
        made.append(net)
        return Workload(
            net,
            torch.optim.AdamW(net.parameters()),
            lambda net, batch: net(batch).mean(),
            lambda size: repeat(torch.ones(size, 16384)),
        )

    subject = Subject(large, device="cpu")
    assert sum(value.nbytes for value in subject.parameters) > 64 * 2**30
    assert subject.profile(1, "fp32").events
    assert not subject.notes


def test_a_batch_that_is_made_of_others_counts_what_its_making_holds() -> None:
    def making() -> Workload:
        made = model()

        def batches(size: int) -> Iterator[Tensor]:
            while True:
                yield torch.ones(size, 1000).sum(1, keepdim=True).expand(size, WIDE).contiguous()

        return Workload(made, torch.optim.SGD(made.parameters()), lambda net, batch: net(batch).mean(), batches)

    profile = Subject(making, device="cpu").profile(100, "fp32")
    assert profile.data >= 100 * 1000 * FLOAT + 100 * WIDE * FLOAT


def test_bf16_halves_what_the_forward_keeps_and_holds_copies_of_the_weights() -> None:
    subject = Subject(workload, device="cpu")
    batch = 1000
    full, _ = moment(subject.profile(batch, "fp32"), "backward")
    half, _ = moment(subject.profile(batch, "bf16"), "backward")
    hidden = batch * HIDDEN * FLOAT
    assert full - hidden - batch * WIDE * FLOAT < hidden / 100
    assert half < full
    assert hidden / 2 < half < hidden / 2 + 3 * batch * WIDE * FLOAT + hidden / 100 + HIDDEN * WIDE * FLOAT


def test_adamw_holds_two_floats_an_element_and_its_step_two_more_of_the_largest() -> None:
    from shardkit._footprint import Stepped

    made = model()
    stepper = Stepper(torch.optim.AdamW(made.parameters()), dict(made.named_parameters()), device="cpu")
    cost = stepper.cost([Stepped((1000, 10), "0.weight"), Stepped((50,), "0.bias")])
    assert cost.state == 2 * FLOAT * (10_000 + 50) + 2 * FLOAT, "and each a count of steps"
    assert cost.passing == 2 * FLOAT * 10_000


def test_sgd_without_momentum_holds_nothing() -> None:
    from shardkit._footprint import Stepped

    made = model()
    stepper = Stepper(torch.optim.SGD(made.parameters()), dict(made.named_parameters()), device="cpu")
    assert stepper.cost([Stepped((1000,), "0.bias")]).state == 0


def test_adafactor_holds_rows_and_columns_of_a_matrix_and_all_of_a_flat_piece() -> None:
    from shardkit._footprint import Stepped

    made = model()
    stepper = Stepper(torch.optim.Adafactor(made.parameters()), dict(made.named_parameters()), device="cpu")
    whole = stepper.cost([Stepped((300, 200), "0.weight")]).state
    flat = stepper.cost([Stepped((300 * 200,), "0.weight")]).state
    assert whole < 3 * FLOAT * 500
    assert flat >= FLOAT * 60_000


class Checkpointed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDE))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checkpointed_pass_holds_the_inputs_of_its_parts_and_one_part_at_a_time(device: str) -> None:
    def checkpointed() -> Workload:
        made = Checkpointed(6)

        def batches(size: int) -> Iterator[Tensor]:
            return repeat(torch.ones(size, WIDE))

        return Workload(made, torch.optim.SGD(made.parameters()), lambda net, batch: net(batch).mean(), batches)

    profile = Subject(checkpointed, device=device).profile(1000, "fp32")
    hidden = 1000 * HIDDEN * FLOAT
    live, _ = moment(profile, "backward")
    assert live < hidden, "no hidden layer is kept"
    most = max(event.high for event in profile.events)
    assert 2 * hidden < most < 5 * hidden, "one part's hidden layers are made again, with their masks"


def test_dropout_on_a_gpu_keeps_a_byte_an_element() -> None:
    def dropping() -> Workload:
        made = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, 1))

        def batches(size: int) -> Iterator[Tensor]:
            return repeat(torch.ones(size, WIDE))

        return Workload(made, torch.optim.SGD(made.parameters()), lambda net, batch: net(batch).mean(), batches)

    elements = 1000 * HIDDEN
    live = {
        kind: moment(Subject(dropping, device=kind).profile(1000, "fp32"), "backward")[0] for kind in ("cpu", "cuda")
    }
    # What dropout returns is kept for the next layer, and its mask: floats on the CPU.
    assert live["cpu"] == pytest.approx(2 * FLOAT * elements, rel=0.02)
    assert live["cuda"] == pytest.approx((FLOAT + 1) * elements, rel=0.02)
