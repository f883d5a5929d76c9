"""The suite that proves a backend: inherit one class, set the backend's name, run pytest."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardkit import Backend, Strategy
from shardkit._registry import claims, describe
from shardkit.testing import _ahead
from shardkit.testing._checkpoints import loaded, moves, saved
from shardkit.testing._held import GROWTH, SLACK, Held, measured, shares
from shardkit.testing._ranks import preload, run
from shardkit.testing._record import Outcome, Outcomes, record
from shardkit.testing.cases._models import installed
from shardkit.testing.cases._table import Case, load_cases

PAGE = "docs/conformance.md"
"""The page of the documentation that says of each part of the suite what must hold, and why."""

ON_OTHER_SIZES = (
    "settings_changed_in_mid_run_hold_from_the_next_step_in_every_group",
    "parameters_of_any_shape_train_side_by_side",
    "a_parameter_that_is_never_used_is_left_alone",
    "a_parameter_that_a_step_leaves_out_is_left_alone_in_it",
    "a_parameter_frozen_in_mid_run_stays_until_it_is_thawed",
    "a_tied_parameter_gets_the_sum_of_its_gradients",
    "groups_that_are_empty_or_frozen_train_nothing",
    "state_that_an_optimizer_brings_counts_under_every_class",
    "weights_loaded_after_prepare_hold_from_then_on",
    "weights_loaded_into_a_part_hold_from_then_on",
)
"""The cases that run on one and on three ranks too, and the first ones on four: those in which it shows how parameters
are split."""

_REFUSALS = ("UnsupportedError", "StrategyError", "InputError")

# What is slow to import, and that cases need.
preload("pytest", "transformers.models.t5.modeling_t5", "transformers.models.gpt2.modeling_gpt2")


class NonconformingError(pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """A test of the suite that a backend fails: what it did, what is right, and the page that says why."""

    def __init__(
        self, backend: str, strategy: str, sentence: str, did: str, right: str, page: str, trace: str = ""
    ) -> None:
        self.did, self.right, self.page = did, right, page
        where = f" under {strategy!r}" if strategy and strategy != backend else ""
        head = f"backend {backend!r}{where}" + (f": {sentence}" if sentence else "")
        lines = [head, f"  what it did:   {did}", f"  what is right: {right}", f"  why:           {page}"]
        super().__init__("\n".join([*lines, *([trace.rstrip()] if trace else [])]), pytrace=False)


class BackendSuite:
    """What every backend must do right, or refuse. Inherit it, and name the backend::

        class TestMine(BackendSuite):
            backend = "mine"

    Each test runs under every variant that the backend declares, on processes of this machine's CPU. A precision that
    isn't declared is tested to be refused, and its cases are skipped. ``left_out`` maps cases that aren't run, by name
    or pattern, to the reason; for some variants only after their strategy: ``"mine:level=3* some_case"``.
    """

    backend: ClassVar[str]
    left_out: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the tests the declared variants, and the other backends."""
        names = metafunc.fixturenames
        variants = self._variants()
        if "case" in names:
            sets = [(variant, case) for variant in variants for case in load_cases()]
            metafunc.parametrize(("strategy", "case"), sets)
        elif "move" in names:
            sets = [(variant, move) for variant in variants for move in moves(variant, _others(self.backend))]
            metafunc.parametrize(("strategy", "move"), sets)
        elif "strategy" in names:
            metafunc.parametrize("strategy", variants)
        if "world_size" in names:
            metafunc.parametrize("world_size", [1, 3] if "checkpoints" in metafunc.function.__name__ else [1, 3, 4])

    # What it declares.

    def test_to_describe_itself_imports_neither_torch_nor_a_library(self) -> None:
        found = ", ".join(_probed(self.backend)["described"])
        right = "nothing heavy is imported before prepare"
        self._require(not found, f"imported {found} to describe itself", right, "laziness")

    def test_to_say_what_it_holds_imports_no_library(self) -> None:
        found = ", ".join(_probed(self.backend)["planned"])
        right = "a plan is made where its library isn't installed"
        self._require(not found, f"imported {found} for its footprint", right, "laziness")

    def test_each_variant_is_a_strategy_of_its_own(self) -> None:
        texts = [variant.strategy for variant in self._declared().variants]
        own = [Strategy.parse(text).backend == self.backend for text in texts]
        right = f"at least one variant, each once, whose strategy begins with {self.backend!r}"
        holds = bool(texts) and all(own) and len(set(texts)) == len(texts)
        self._require(holds, f"declares {', '.join(texts) or 'none'}", right, "declaration")

    @pytest.mark.parametrize("what", ["precision", "device", "option", "value"])
    def test_what_it_does_not_declare_is_refused_before_its_library_is_imported(self, what: str) -> None:
        for told in _probed(self.backend)["refused"][what]:
            named = told["error"] in _REFUSALS and self.backend in told["message"]
            did = f"to {told['asked']} it said {told['error']}: {told['message']}"
            self._require(named, did, f"a {' or '.join(_REFUSALS)} that names {self.backend!r}", "refusals")
            loaded = ", ".join(told["loaded"])
            did = f"imported {loaded} before it refused {told['asked']}"
            self._require(not loaded, did, "what isn't declared is refused first", "refusals")

    # What it computes.

    def test_case(self, strategy: str, case: str, request: pytest.FixtureRequest) -> None:
        """The case holds under the strategy, or is refused where it may be."""
        found = self._outcomes(strategy, case, request)[case]
        self._judge(load_cases()[case], strategy, found)
        if found[0].kind == "refused":
            request.node.user_properties.append(("refused", found[0].message))

    def test_holds_on_other_numbers_of_ranks(
        self, strategy: str, world_size: int, request: pytest.FixtureRequest
    ) -> None:
        self._require_library()
        chosen = self._chosen(strategy, world_size)
        if not chosen:
            pytest.skip("all of these cases are left out")
        asked = _ahead.selected(request.session, request.function, "strategy", "world_size")
        wanted = [(one, size, self._chosen(one, size)) for one, size in asked]
        for name, found in _ahead.result((strategy, world_size, chosen), wanted, _on_other_sizes).items():
            self._judge(load_cases()[name], strategy, found)

    # What it saves.

    def test_checkpoints_move(self, strategy: str, move: str, request: pytest.FixtureRequest) -> None:
        """A run goes on from another strategy's checkpoint as if it had been its own, and the other way round."""
        self._require_library()
        wanted = _ahead.selected(request.session, request.function, "strategy")
        found = _ahead.result((strategy, self.backend), [(one, self.backend) for (one,) in wanted], _moved)[move]
        self._require_right(found, strategy, f"a checkpoint goes {move}", "checkpoints")

    def test_checkpoints_move_to_other_numbers_of_ranks(
        self, strategy: str, world_size: int, request: pytest.FixtureRequest
    ) -> None:
        self._require_library()
        wanted = _ahead.selected(request.session, request.function, "strategy")
        for name, found in _ahead.result((strategy,), wanted, _resized)[world_size].items():
            self._require_right(found, strategy, f"{name}, on {world_size} ranks", "checkpoints")

    # What it holds.

    def test_a_rank_holds_no_more_than_its_share_between_windows(
        self, strategy: str, request: pytest.FixtureRequest
    ) -> None:
        held, most, _ = self._held(strategy, request)
        self._require_share(strategy, held.between / held.model, most, "parameters and optimizer state")

    def test_a_rank_holds_no_more_than_its_share_of_gradients(
        self, strategy: str, request: pytest.FixtureRequest
    ) -> None:
        held, rest, most = self._held(strategy, request)
        # A buffer that is there all the time counts where it is, and what is free of the share may be used.
        room = max(0.0, rest - held.between / held.model)
        self._require_share(strategy, held.gradients / held.model, most + room, "gradients")

    def test_a_rank_holds_no_more_after_a_hundred_steps(self, strategy: str, request: pytest.FixtureRequest) -> None:
        held, _, _ = self._held(strategy, request)
        did, right = f"holds {held.grown:,} bytes more after 100 steps", f"no more, within {GROWTH:,} bytes"
        self._require(held.grown <= GROWTH, did, right, "memory", strategy, "What a rank holds doesn't grow")

    # How it is judged.

    def _declared(self) -> Backend:
        name = getattr(self, "backend", "")
        if name not in claims():
            pytest.fail(
                f"no backend is named {name!r}: install its distribution, such as with pip install -e .; installed are "
                f"{', '.join(claims())}",
                pytrace=False,
            )
        return describe(name)

    def _variants(self) -> list[str]:
        return [variant.strategy for variant in self._declared().variants_on("cpu")]

    def _require_library(self) -> None:
        backend = self._declared()
        if backend.library is not None and importlib.util.find_spec(backend.library) is None:
            pytest.skip(f"{backend.library} is not installed: {backend.install}")
        if "cpu" not in backend.devices:
            pytest.skip(f"backend {backend.name!r} doesn't declare device 'cpu', on which the suite runs")

    @classmethod
    def reason_left_out(cls, case: str, strategy: str) -> str | None:
        """Return why a case isn't run under a strategy; None where it is."""
        for pattern, reason in cls.left_out.items():
            where, _, name = pattern.rpartition(" ")
            if fnmatchcase(case, name) and fnmatchcase(strategy, where or "*"):
                return reason
        return None

    def _outcomes(self, strategy: str, case: str, request: pytest.FixtureRequest) -> Outcomes:
        reason = self.reason_left_out(case, strategy)
        if reason is not None:
            pytest.skip(reason)
        self._require_library()
        wanted: dict[tuple[str, str, tuple[str, ...]], None] = {}
        for one, name in _ahead.selected(request.session, request.function, "strategy", "case"):
            wanted[self._group(one, load_cases()[name].topic)] = None
        found: Outcomes = _ahead.result(self._group(strategy, load_cases()[case].topic), wanted, case_outcomes)
        return found

    def _group(self, strategy: str, topic: str) -> tuple[str, str, tuple[str, ...]]:
        names = [name for name, case in load_cases().items() if case.topic == topic]
        return strategy, topic, tuple(name for name in names if self.reason_left_out(name, strategy) is not None)

    def _chosen(self, strategy: str, world_size: int) -> tuple[str, ...]:
        names = ON_OTHER_SIZES[:2] if world_size > 3 else ON_OTHER_SIZES
        return tuple(name for name in names if self.reason_left_out(name, strategy) is None)

    def _judge(self, case: Case, strategy: str, found: list[Outcome]) -> None:
        kinds = {outcome.kind for outcome in found}
        if kinds == {"skipped"}:
            pytest.skip(found[0].message)
        if kinds == {"refused"} and case.or_refused:
            messages = {outcome.message for outcome in found}
            named = all(self.backend in message for message in messages)
            self._require(
                len(messages) == 1 and named,
                f"refused with {' and '.join(map(repr, sorted(messages)))}",
                f"the same message on every rank, that names {self.backend!r} and says what would be right",
                "refusals",
                strategy,
            )
            return
        on = "" if len(found) == 2 else f", on {len(found)} rank{'s' if len(found) > 1 else ''}"
        self._require_right(found, strategy, case.sentence + on, case.topic, or_refused=case.or_refused)

    def _require_right(
        self, found: list[Outcome], strategy: str, sentence: str, section: str, *, or_refused: bool = False
    ) -> None:
        wrong = {rank: outcome for rank, outcome in enumerate(found) if outcome.kind != "right"}
        if not wrong:
            return
        # A rank that lost the other one says less than that the other is lost.
        first = min(wrong.values(), key=lambda outcome: outcome.kind != "lost")
        did = "; ".join(dict.fromkeys(f"rank {rank} {outcome.told.did}" for rank, outcome in wrong.items()))
        if len(wrong) < len(found):
            did += "; the others were right"
        right = first.told.right or sentence
        right += ", or an UnsupportedError that is the same on every rank" if or_refused else ""
        self._require(False, did, right, section, strategy, sentence, first.trace)

    def _require_share(self, strategy: str, held: float, most: float, what: str) -> None:
        self._require(
            held <= most + SLACK,
            f"holds {held:.2f} times the model's size in {what}",
            f"{most:.2f} times by what it declares to split over 2 ranks, and {SLACK} more for buffers",
            "memory",
            strategy,
            "A rank holds its share, and no more",
        )

    def _require(
        self,
        holds: bool,
        did: str,
        right: str,
        section: str,
        strategy: str = "",
        sentence: str = "",
        trace: str = "",
    ) -> None:
        if not holds:
            raise NonconformingError(self.backend, strategy, sentence, did, right, f"{PAGE}#{section}", trace)

    def _held(self, strategy: str, request: pytest.FixtureRequest) -> tuple[Held, float, float]:
        self._require_library()
        if sys.platform != "linux":
            pytest.skip("what a process holds is counted by glibc on Linux")
        variant = next(one for one in self._declared().variants if one.strategy == strategy)
        wanted = _ahead.selected(request.session, request.function, "strategy")
        found = _ahead.result((strategy,), wanted, _measured)
        rest, gradients = shares(variant.shards, len(found))
        return max(found, key=lambda held: held.between + held.gradients), rest, gradients


SEEN: dict[str, Outcomes] = {}
"""What cases came to in this process so far, by strategy."""


@cache
def case_outcomes(strategy: str, topic: str, left_out: tuple[str, ...] = ()) -> Outcomes:
    """Return the outcomes of the cases of a topic under a strategy, from one launch of two ranks."""
    chosen = {
        name: case.run for name, case in load_cases().items() if case.topic == topic and name not in set(left_out)
    }
    found = record(strategy, chosen)
    SEEN.setdefault(strategy, {}).update(found)
    return found


def _on_other_sizes(strategy: str, world_size: int, names: tuple[str, ...]) -> Outcomes:
    cases = load_cases()
    return record(strategy, {name: cases[name].run for name in names}, world_size)


def _moved(strategy: str, backend: str) -> Outcomes:
    return record(strategy, moves(strategy, _others(backend)))


def _resized(strategy: str) -> dict[int, Outcomes]:
    """Return, by the number of ranks that load, how runs go on from what two ranks saved."""
    with tempfile.TemporaryDirectory(prefix="shardkit-checkpoints-") as made:
        name, folder = "a checkpoint of 2 ranks goes on", Path(made)
        written = record(strategy, {"saved": saved}, 2, folder)["saved"]
        if any(outcome.kind != "right" for outcome in written):
            return {size: {"2 ranks save a checkpoint": written} for size in (1, 3)}
        return {size: record(strategy, {name: loaded(folder / "saved")}, size) for size in (1, 3)}


def _measured(strategy: str) -> list[Held]:
    return run(measured, strategy, processes=2)


@cache
def _probed(backend: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", "import shardkit.testing._declaration as probe; probe.main()", backend],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"backend {backend!r} can't be asked what it declares:\n{done.stderr.strip()}", pytrace=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _others(backend: str) -> list[str]:
    """Return a strategy of each other backend that can run here: the one that splits most."""
    found = []
    for name, other in installed().items():
        if name != backend and other.variants_on("cpu"):
            found.append(max(other.variants_on("cpu"), key=lambda variant: len(variant.shards)).strategy)
    return found
