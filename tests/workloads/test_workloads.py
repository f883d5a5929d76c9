"""Workloads: the built-in ones keep their promises, and one of a user's own that does not is told which."""

from __future__ import annotations

import inspect
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardkit import Workload, workloads
from shardkit.errors import InputError
from shardkit.tools._trial import mapped
from shardkit.tools.compare import TOLERANCE
from shardkit.workloads import _find, _gpt2, _t5, t5_tiny
from shardkit.workloads._contract import check_batches, check_weights, tensors
from shardkit.workloads._settings import typed
from shardkit.workloads._text import words

NAMES = ["convnet", "gpt2-tiny", "mlp", "t5-tiny"]
SHORT_T5 = "t5-small:source=12,target=12,dropout=0"
# The smallest of the published sizes, on short passages: the larger ones differ from it in numbers only.
SMALL = [*NAMES, SHORT_T5]


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


@pytest.mark.parametrize("name", SMALL)
def test_a_built_in_workload_keeps_its_promises(name: str) -> None:
    workload = check_weights(_find.function(name))
    check_batches(workload, size=3, count=4)
    for part in tensors(next(workload.batches(3))):
        assert len(part) == 3


@pytest.mark.parametrize("name", [*NAMES, pytest.param(SHORT_T5, marks=pytest.mark.slow)])
def test_the_loss_of_a_built_in_workload_falls(name: str) -> None:
    losses = train(name, torch.float32, steps=12)
    assert min(losses[-3:]) < 0.9 * losses[0]


@pytest.mark.parametrize("name", sorted({*SMALL, SHORT_T5 + ",label_smoothing=0.1"} - {"convnet"}))
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


# As published; counted here, of the built-in workloads, without their memory.
PARAMETERS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_size_has_as_many_parameters_as_published(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = workloads.load(name).model
    assert sum(value.numel() for value in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "frozen"), [("t5-base", 32128 * 768), ("gpt2", (50257 + 1024) * 768), ("t5-tiny", 261 * 128)]
)
def test_frozen_embeddings_are_not_trained(name: str, frozen: int) -> None:
    with torch.device("meta"):
        made = workloads.load(f"{name}:frozen_embeddings=true")
        whole = sum(value.numel() for value in workloads.load(name).model.parameters())
    trained = [value for value in made.model.parameters() if value.requires_grad]
    assert sum(value.numel() for value in trained) == whole - frozen
    held = [value for group in made.optimizer.param_groups for value in group["params"]]
    assert {id(value) for value in held} == {id(value) for value in trained}


@pytest.mark.parametrize(
    "name", ["t5-base:source=8,target=6,label_smoothing=0.1", "gpt2:length=8,label_smoothing=0.1", "t5-tiny"]
)
def test_a_loss_and_its_gradient_can_be_taken_without_memory(name: str) -> None:
    with torch.device("meta"):
        batches = workloads.load(name).batches
    batch = next(batches(3))
    with FakeTensorMode() as mode:
        made = workloads.load(name)
        value = made.loss(made.model, mapped(batch, mode.from_tensor))
        value.backward()  # type: ignore[no-untyped-call]
    assert value.shape == ()
    assert all(parameter.grad is not None for parameter in made.model.parameters())


def test_smoothed_labels_cost_what_they_do_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0, math.log(2)], [0.0, 0.0, 0.0]]])
    labels = torch.tensor([[2, 1]])
    # Probabilities 1/4, 1/4, 1/2 and thrice 1/3; of the label 0.9, and 0.1 spread over the three words.
    first = -0.9 * math.log(1 / 2) - 0.1 / 3 * math.log(1 / 4 * 1 / 4 * 1 / 2)
    assert _t5.mean_over_tokens(logits, labels, 0.1).item() == pytest.approx((first + math.log(3)) / 2, rel=1e-6)
    plain = _t5.mean_over_tokens(logits, labels, 0.0).item()
    assert plain == pytest.approx((math.log(2) + math.log(3)) / 2, rel=1e-6)


@pytest.mark.parametrize("name", ["t5-tiny", SHORT_T5])
def test_the_setting_smooths_the_labels_of_the_loss(name: str) -> None:
    plain = workloads.load(name)
    smooth = workloads.load(f"{name}{',' if ':' in name else ':'}label_smoothing=0.1")
    batch = next(plain.batches(2))
    with torch.no_grad():
        given = plain.model(input_ids=batch["input_ids"], labels=batch["labels"])
        spread = -given.logits.log_softmax(-1).mean()
        assert plain.loss(plain.model, batch).item() == pytest.approx(given.loss.item(), rel=1e-6)
        assert smooth.loss(smooth.model, batch).item() == pytest.approx(
            (0.9 * given.loss + 0.1 * spread).item(), rel=1e-6
        )


def test_the_loss_of_gpt2_is_of_each_token_after_the_first() -> None:
    made = workloads.load("gpt2-tiny")
    batch = next(made.batches(2))
    with torch.no_grad():
        given = made.model(input_ids=batch, labels=batch)
        assert _gpt2.loss(made.model, batch).item() == pytest.approx(given.loss.item(), rel=1e-6)
        spread = -given.logits[:, :-1].log_softmax(-1).mean()
        smooth = _gpt2.loss(made.model, batch, label_smoothing=0.1).item()
        assert smooth == pytest.approx((0.9 * given.loss + 0.1 * spread).item(), rel=1e-6)


def test_dropout_is_what_it_is_set_to() -> None:
    with torch.device("meta"):
        for name in ("t5-small", "gpt2", "t5-tiny", "gpt2-tiny"):
            for text, rate in ((f"{name}:dropout=0.25", 0.25), (f"{name}:dropout=0", 0.0)):
                found = {part.p for part in workloads.load(text).model.modules() if isinstance(part, nn.Dropout)}
                assert found == {rate}, text


def test_the_decoder_is_given_the_token_before_the_one_it_is_asked_for() -> None:
    class Model(nn.Module):
        """It knows the answer to the token before."""

        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*decoder_input_ids.shape, 10)
            logits[0, range(3), [5, 6, 7]] = 50.0
            assert decoder_input_ids.tolist() == [[_t5.PAD, 5, 6]]
            return SimpleNamespace(logits=logits)

    labels = torch.tensor([[5, 6, 7]])
    batch = {"input_ids": torch.tensor([[8, 9]]), "decoder_input_ids": torch.tensor([[0, 5, 6]]), "labels": labels}
    assert _t5.loss(Model(), batch).item() == pytest.approx(0, abs=1e-6)


def test_the_target_is_what_follows_the_source() -> None:
    text = (words() + _t5.FIRST_WORD).tolist()
    batch = next(_t5.batches(5, source=40, target=24))
    for source, read, target in zip(*(batch[name].tolist() for name in _T5_PARTS), strict=True):
        assert (len(source), len(read), len(target)) == (40, 24, 24)
        assert source[-1] == target[-1] == _t5.END
        assert read == [_t5.PAD, *target[:-1]]
        passage = source[:-1] + target[:-1]
        starts = (place for place, word in enumerate(text) if word == passage[0])
        assert any(text[start : start + len(passage)] == passage for start in starts)


_T5_PARTS = ("input_ids", "decoder_input_ids", "labels")


def test_words_are_numbered_by_how_often_they_come() -> None:
    counts = torch.bincount(words())
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)
    assert len(counts) + _t5.FIRST_WORD < _t5.VOCABULARY < _gpt2.VOCABULARY


@pytest.mark.parametrize("batches", [_t5.batches, _gpt2.batches])
def test_thousands_of_samples_are_made_at_once(batches: Any) -> None:
    next(batches(1))
    start = time.perf_counter()
    for part in tensors(next(batches(4000))):
        assert len(part) == 4000
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("name", ["t5-tiny", SHORT_T5])
def test_an_answer_has_as_many_tokens_as_the_target(name: str) -> None:
    made = workloads.load(name)
    batch = next(made.batches(2))
    calls = []

    def end_at_once(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([_t5.END]), 1e3)

    # It is no shorter even if the model would rather end: ranks call it equally often.
    made.model.lm_head.register_forward_hook(end_at_once)  # type: ignore[union-attr,operator]
    made.model.get_encoder().register_forward_hook(lambda *_: calls.append(1))  # type: ignore[operator]
    assert made.generate is not None
    assert made.tokens is not None
    answer = made.generate(made.model.eval(), batch)
    assert answer.shape == batch["labels"].shape
    assert len(calls) == 1
    assert made.tokens(batch) == batch["input_ids"].numel() + batch["labels"].numel()


def test_a_batch_of_gpt2_has_its_length_in_tokens_of_each_sample() -> None:
    made = workloads.load("gpt2-tiny")
    assert made.tokens is not None
    assert made.generate is None
    assert made.tokens(next(made.batches(3))) == 3 * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "t5-small:targte=3",
            r"workload 't5-small' has no setting 'targte': did you mean 'target'\? its settings are ",
        ),
        ("t5-small:target=many", "setting 'target' of workload 't5-small' is a whole number, not 'many'"),
        ("t5-small:target=0", "target of the workload is at least 1, not 0"),
        ("gpt2:length=2000", "length of the workload is between 2 and 1024, not 2000"),
        ("t5-tiny:dropout=1.5", "dropout of the workload is between 0 and 1, not 1.5"),
        ("t5-small:target", "settings of a workload read key=value,key=value: 'target' in 't5-small:target' doesn't"),
        ("t5-small:target=3,target=4", "sets 'target' twice"),
        ("mlp:size=3", "workload 'mlp' has no setting 'size': it has none"),
        ("t5-smal:target=3", "no workload is named 't5-smal': did you mean 't5-small'"),
    ],
)
def test_wrong_settings_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        workloads.load(text)


def test_settings_of_ones_own_file_are_typed_by_its_function(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from __future__ import annotations\nimport torch, shardkit\n"
        "def workload(size, *, bias: bool = True, scale=0.5, rows: int | None = None):\n"
        "    model = torch.nn.Linear(int(size), rows or 1, bias)\n"
        "    return shardkit.Workload(model, torch.optim.SGD(model.parameters(), lr=scale), None, None)\n"
        "other = workload\n"
    )
    for text in (f"{own}:size=4,bias=no,scale=2", f"{own}:other:size=4,bias=no,scale=2,rows=1"):
        for again in (text, _find.check(text)):
            made = workloads.load(again)
            assert str(made.model) == "Linear(in_features=4, out_features=1, bias=False)"
            assert made.optimizer.param_groups[0]["lr"] == 2.0
            assert type(made.optimizer.param_groups[0]["lr"]) is float
    with pytest.raises(InputError, match=r"needs a value for its setting 'size': write :size=\.\.\."):
        workloads.load(f"{own}:workload:scale=2")
    with pytest.raises(InputError, match=r"setting 'bias' of workload 'own.py:workload' is true or false, not 'x'"):
        workloads.load(f"{own}:size=4,bias=x")


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
    script = "import sys; from shardkit import workloads; print(*workloads.names()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted([*NAMES, *PARAMETERS])


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


def test_the_page_lists_every_built_in_workload_and_its_settings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert sorted(rows) == workloads.names()
    for name, row in rows.items():
        parameters = inspect.signature(_find.any_function(name)).parameters
        if "the same |" not in row:
            defaults = dict(item.split("=") for item in row.rpartition(" | ")[2].split("`")[1::2])
            assert list(defaults) == list(parameters), name
            for key, value in typed(_find.any_function(name), defaults, name).items():
                assert value == parameters[key].default, (name, key)
        if name in PARAMETERS:
            assert f"| {PARAMETERS[name]:,} |" in row


def test_the_documented_workload_keeps_its_promises(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    code = page.partition("<!-- workload -->\n```python\n")[2].partition("```")[0]
    own = tmp_path / "documented.py"
    own.write_text(code)
    assert str(workloads.load(f"{own}:width=32").model[0]) == "Linear(in_features=16, out_features=32, bias=True)"  # type: ignore[index]
    workload = check_weights(_find.function(str(own)))
    check_batches(workload, size=3, count=4)
    assert workload.loss(workload.model, next(workload.batches(3))).requires_grad
