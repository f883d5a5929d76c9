"""What a benchmark compares: strategies crossed with precisions, the baseline first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit import _registry
from shardkit._backend import NAMES
from shardkit._options import typed_options
from shardkit._prepare import resolve
from shardkit._strategy import Strategy
from shardkit.bench._results import Row
from shardkit.errors import InputError, MissingLibraryError, PluginError, StrategyError, UnsupportedError


@dataclass
class Arm:
    """A strategy, and the row as far as it is known; a row that isn't ``"measured"`` is done."""

    strategy: Strategy | None
    row: Row

    @property
    def open(self) -> bool:
        return self.row.status == "measured"


def arms(
    strategies: Sequence[str], precisions: Sequence[str], baseline: str | None, accumulate: int, device: str
) -> list[Arm]:
    """Return the arms in the order of rows: the baseline, then every strategy in every precision, each once.

    Without ``strategies`` they are all variants of all backends; one whose library is missing is a row that says so.

    Raises:
        ShardkitError: the text of a strategy or a precision is wrong, or the baseline can't run.
    """
    for name in precisions:
        # It checks the name.
        Strategy("any", precision=name)
    wanted = list(strategies) or _variants()
    first = _arm(baseline if baseline is not None else _plain(wanted), None, accumulate, device)
    if first.strategy is None or not first.open:
        raise InputError(f"the baseline {first.row.strategy!r} can't run: {first.row.note}")
    found = [first]
    crossed: Sequence[str | None] = precisions or (None,)
    for text in wanted:
        for precision in crossed:
            arm = _arm(text, precision, accumulate, device)
            if all((arm.row.strategy, arm.row.precision) != (one.row.strategy, one.row.precision) for one in found):
                found.append(arm)
    return found


def _variants() -> list[str]:
    """Return the strategies of every variant of every backend, in the order of names."""
    found = []
    for name in _registry.claims():
        try:
            found += [variant.strategy for variant in _registry.describe(name).variants]
        except PluginError:
            # A row of its own, where its name can be asked for.
            found += [name] if NAMES.fullmatch(name) else []
    return found


def _plain(wanted: Sequence[str]) -> str:
    """Return the first variant that can run and leaves all on every rank; the first strategy if there is none."""
    for name in _registry.claims():
        try:
            backend = _registry.describe(name)
            _registry.require_library(backend)
        except PluginError:
            continue
        for variant in backend.variants:
            if not variant.shards and not variant.offloads:
                return variant.strategy
    if not wanted:
        raise InputError("no backend is installed that could be measured")
    return wanted[0]


def _arm(text: str, precision: str | None, accumulate: int, device: str) -> Arm:
    """Return the arm of a strategy, in a precision or in its own.

    Raises:
        ShardkitError: the text is wrong, or sets what holds for all.
    """
    import torch

    from shardkit._checks import check_fit

    strategy = resolve(text)
    if strategy.accumulate != 1:
        raise StrategyError(
            f"strategy {text!r} sets 'accumulate', which holds for all of a benchmark: use --accumulate"
        )
    if precision is not None:
        if strategy.precision not in ("fp32", precision):
            raise StrategyError(f"strategy {text!r} sets 'precision', and so does --precisions: leave one of them out")
        strategy = dataclasses.replace(strategy, precision=precision)
    name = str(dataclasses.replace(strategy, precision="fp32"))
    row = Row(name, strategy.precision, "measured")
    strategy = dataclasses.replace(strategy, accumulate=accumulate)
    try:
        backend = _registry.describe(strategy.backend)
        typed_options(backend, strategy.options)
        _registry.require_library(backend)
        check_fit(backend, strategy, torch.device(device))
    except MissingLibraryError as error:
        return Arm(None, dataclasses.replace(row, status="missing", note=str(error)))
    except PluginError as error:
        return Arm(None, dataclasses.replace(row, status="failed", note=str(error)))
    except UnsupportedError as error:
        return Arm(None, dataclasses.replace(row, status="refused", note=str(error)))
    return Arm(strategy, row)
