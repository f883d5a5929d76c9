"""All that is known of a comparison, for those who look for its cause."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from shardkit.parity._comparable import differences
from shardkit.parity._pair import Pair
from shardkit.parity._parting import partings
from shardkit.parity._replay import FIT, Replay, Rule, told
from shardkit.parity._results import Difference, Parting
from shardkit.parity._roundoff import Bound

_MOST_STEPS = 64
"""How many steps are held against the rules that the facts tell."""

_STEPS_AFTER = 8
"""How many steps beyond the first that differs are held against other rules."""


@final
class Case:
    """Two runs, and where they part."""

    def __init__(self, pair: Pair, itself: Pair | None) -> None:
        self.pair = pair
        self.itself = itself
        self.differences: list[Difference] = differences(pair)
        self.bound = Bound(pair, itself)
        # Without sketches there is nothing to replay.
        self.rules: tuple[Rule | None, Rule | None] = (told(pair.a), told(pair.b)) if pair.detailed else (None, None)
        self.first_bit: Parting | None
        self.parting: Parting | None
        self.first_bit, self.parting = partings(pair, self.bound, self._moved_otherwise)

    @cached_property
    def replays(self) -> tuple[Replay, Replay]:
        """Both runs' first steps, to hold against what the facts tell."""
        steps = min(self.pair.steps, _MOST_STEPS)
        return Replay(self.pair.a, steps), Replay(self.pair.b, steps)

    @cached_property
    def short_replays(self) -> tuple[Replay, Replay]:
        """Both runs up to a little after they part, to try many rules on."""
        steps = min(self.pair.steps, (self.parting.step if self.parting else 1) + _STEPS_AFTER)
        return Replay(self.pair.a, steps), Replay(self.pair.b, steps)

    @cached_property
    def follow(self) -> tuple[bool | None, bool | None]:
        """Whether each run's weights follow the rule that its own facts tell; None where they tell none."""
        one, other = (
            None if rule is None else replay.fits(rule) for rule, replay in zip(self.rules, self.replays, strict=True)
        )
        return one, other

    @cached_property
    def _moved_otherwise(self) -> Tensor | None:
        """``(S, P)``: which weights of one run moved by another rule than the one that the other run followed."""
        if not bool((self.pair.weight_apart > 0).any()):
            return None
        found = torch.zeros(self.pair.steps, len(self.pair.names), dtype=torch.bool)
        order = [self.pair.b.parameters.index(name) for name in self.pair.names]
        one, other = self.replays
        for rule, follows, replay in ((self.rules[0], self.follow[0], other), (self.rules[1], self.follow[1], one)):
            if rule is not None and follows:
                misfit = replay.misfit(rule)
                found[: replay.steps] |= (misfit if replay is one else misfit[:, order]) > FIT
        return found
