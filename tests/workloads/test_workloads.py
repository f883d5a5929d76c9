"""Workloads: the built-in ones keep their promises, and one of a user's own that does not is told which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import Workload, workloads
from shardkit.errors import InputError
from shardkit.tools.compare import TOLERANCE
from shardkit.workloads import _find, t5_tiny
from shardkit.workloads._contract import check_batches, check_weights, tensors

NAMES = workloads.names()


def train(name: str, dtype: torch.dtype, steps: int, size: int = 8, parts: int = 2) -> list[float]:
    """Return the losses of plain training in some precision, each step on so many micro-batches."""
    workload = workloads.load(name)
    workload.model.to(dtype)
    batches = workload.batches(size)
    losses = []
    for _ in range(steps):
        told = []
        for batch in itertools.islice(batches, parts):
            loss = workload.loss(workload.model, cast(batch, dtype))
            (loss / parts).backward()  # type: ignore[no-untyped-call]
            told.append(loss.item())
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(sum(told) / parts)
    return losses


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, tuple):
        return tuple(cast(value, dtype) for value in batch)
    return batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_workload_keeps_its_promises(name: str) -> None:
    workload = check_weights(_find.function(name))
    check_batches(workload, size=3, count=4)
    for part in tensors(next(workload.batches(3))):
        assert len(part) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_built_in_workload_falls(name: str) -> None:
    losses = train(name, torch.float32, steps=12)
    assert min(losses[-3:]) < 0.9 * losses[0]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"convnet"}))
def test_the_mean_over_a_batch_is_the_mean_of_its_parts_means(name: str) -> None:
    workload = workloads.load(name).model.double(), workloads.load(name)
    model, made = workload
    whole = cast(next(made.batches(6)), torch.float64)
    if isinstance(whole, dict):
        halves: list[Any] = [{key: value[at] for key, value in whole.items()} for at in (slice(3), slice(3, 6))]
    elif isinstance(whole, tuple):
        halves = [tuple(value[at] for value in whole) for at in (slice(3), slice(3, 6))]
    else:
        halves = [whole[:3], whole[3:]]
    mean = sum(made.loss(model, half).item() for half in halves) / 2
    assert mean == pytest.approx(made.loss(model, whole).item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_round_off_of_float32_stays_within_half_the_tolerance(name: str) -> None:
    single, double = train(name, torch.float32, steps=30), train(name, torch.float64, steps=30)
    apart = [abs(loss - right) / right for loss, right in zip(single, double, strict=True)]
    print(f"{name}: {max(apart):.1e}")
    assert max(apart) < TOLERANCE / 2


def test_corrupted_text_and_its_gaps_make_the_text_again() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        text = torch.arange(t5_tiny.LENGTH) + t5_tiny.FIRST_BYTE
        seen, hidden = (part.tolist() for part in t5_tiny.corrupt(text, generator))
        assert (len(seen), len(hidden)) == (64 - 10 + 3 + 1, 10 + 3 + 1)
        assert seen[-1] == hidden[-1] == t5_tiny.END
        gaps: dict[int, list[int]] = {}
        for token in hidden[:-1]:
            if token >= t5_tiny.FIRST_GAP:
                gaps[token] = []
            else:
                gaps[list(gaps)[-1]].append(token)
        again = [byte for token in seen[:-1] for byte in gaps.get(token, [token])]
        assert again == text.tolist()


def test_gpt2_tiny_ties_its_weights() -> None:
    model = workloads.load("gpt2-tiny").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator,union-attr]


def test_names_are_found_without_importing_torch() -> None:
    assert NAMES == ["convnet", "gpt2-tiny", "mlp", "t5-tiny"]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 't5-tiny'"):
        workloads.load("t5tiny")
    with pytest.raises(InputError, match="no workload is named 'x'"):
        workloads.load("x")


def test_a_file_of_ones_own_is_a_workload(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("SIZE = 5\n")
    own = tmp_path / "own.py"
    own.write_text(
        "import torch, shardkit\nfrom neighbour import SIZE\n"
        "def small():\n"
        "    model = torch.nn.Linear(SIZE, 1)\n"
        "    return shardkit.Workload(model, torch.optim.SGD(model.parameters(), lr=.1), None, None)\n"
        "def nothing():\n    return 3\n"
    )
    assert isinstance(workloads.load(f"{own}:small"), Workload)
    with pytest.raises(InputError, match=r"has no function 'workload': its functions are small, nothing"):
        workloads.load(str(own))
    with pytest.raises(InputError, match=r"returns a int: it returns a shardkit.Workload"):
        workloads.load(f"{own}:nothing")
    with pytest.raises(InputError, match="there is no workload file"):
        workloads.load(str(tmp_path / "other.py"))


class Batches:
    """Ways in which batches break their promise."""

    @staticmethod
    def of_one_size(size: int) -> Iterator[torch.Tensor]:
        return itertools.repeat(torch.ones(4, 2))

    @staticmethod
    def that_end(size: int) -> Iterator[torch.Tensor]:
        return iter([torch.ones(size, 2)] * 3)

    @staticmethod
    def that_vary(size: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(size, 2)

    @staticmethod
    def in_a_list(size: int) -> Any:
        return [torch.ones(size, 2)] * 100


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (Batches.of_one_size, r"batches\(5\) of the workload yields 4 samples"),
        (Batches.that_end, "ends after 3 of 8 batches"),
        (Batches.that_vary, "gives another batch 0 when it is called again"),
        (Batches.in_a_list, "returns an iterator over batches, not a list"),
    ],
)
def test_batches_that_break_their_promise_are_refused(batches: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_batches(replace(workloads.load("mlp"), batches=batches), size=4, count=8)


def test_weights_that_no_seed_fixes_are_refused() -> None:
    def make() -> Workload:
        return replace(workloads.load("mlp"), model=nn.Sequential(nn.Linear(2, 2)))

    check_weights(_find.function("mlp"))
    torch.manual_seed(0)
    draws = iter([1.0, 2.0])

    def unseeded() -> Workload:
        made = make()
        made.model[0].weight.data.fill_(next(draws))  # type: ignore[index,union-attr]
        return made

    with pytest.raises(InputError, match=r"weights differ between two calls, first in '0\.weight'"):
        check_weights(unseeded)


def test_the_documented_workload_keeps_its_promises(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    code = page.partition("<!-- workload -->\n```python\n")[2].partition("```")[0]
    own = tmp_path / "documented.py"
    own.write_text(code)
    workload = check_weights(_find.function(str(own)))
    check_batches(workload, size=3, count=4)
    assert workload.loss(workload.model, next(workload.batches(3))).requires_grad
