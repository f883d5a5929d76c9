"""What the optimizer did: torch's own, run again on the sampled elements with the recorded gradients and rates.

A trace holds some elements of each weight and gradient at every step. Optimizers that treat each element by itself do
to them what they did to the whole. So a rule for the step, such as AdamW with the gradient clipped to norm 1, is tried
on these elements, each step from the recorded weights, and either gives the weights after it to the last bits, or is
not what was done. No other run is needed for it, and no round-off grows.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from shardkit.parity._sketch import ABSENT, ELEMENTS, SQUARE, places
from shardkit.parity._trace import Trace

FIT = 3e-5
"""How far a weight may be from where a rule moves it, relative to the movement, beside its last bits. A rule that was
followed gives the recorded bits on the built-in workloads under every strategy; what is left is for clipping, whose
coefficient is made of norms that were added up in another order, and for fused optimizers."""

_LAST_BITS = 4 * 2.0**-24
"""What of a weight is rounding, relative to it."""

_FEW = 24
"""How many parameters many rules are tried on."""

_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


@dataclass(frozen=True)
class Rule:
    """How a step is made: a torch optimizer, its settings by group, and what happens to the gradients before."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    members: tuple[tuple[str, ...], ...]
    """The names of the parameters in each group."""
    max_norm: float | None = None
    scale: float = 1.0
    """What the averaged gradients are multiplied by, after clipping."""
    zeros: bool = False
    """Whether a parameter without a gradient gets one of zeros."""
    everywhere: bool = False
    """Whether parameters of no group are stepped with the first one, those without a gradient with zeros."""

    def but(self, **settings: Any) -> Rule:
        """Return the rule with settings of all groups replaced."""
        return dataclasses.replace(self, groups=tuple({**group, **settings} for group in self.groups))

    def turned(self, kind: str) -> Rule:
        """Return the rule with another optimizer of the same settings."""
        return dataclasses.replace(self, kind=kind, groups=tuple(_accepted(kind, group) for group in self.groups))


def told(trace: Trace) -> Rule | None:
    """Return the rule that the facts of a trace tell; None for an optimizer that isn't known to be elementwise."""
    optimizer = trace.facts.get("optimizer") or {}
    kind = _kind(str(optimizer.get("class", "")), str(optimizer.get("module", "")))
    groups = optimizer.get("groups") or []
    if kind is None or not groups or len(groups) != trace.rates.shape[1]:
        return None
    if kind == "Adam" and any(group.get("decoupled_weight_decay") for group in groups):
        kind = "AdamW"
    max_norm = (trace.facts.get("settings") or {}).get("max_grad_norm")
    members = tuple(tuple(group.get("params", ())) for group in groups)
    return Rule(kind, tuple(_accepted(kind, group) for group in groups), members, max_norm)


def _kind(name: str, module: str) -> str | None:
    if module.startswith("torch."):
        return name if name in _ELEMENTWISE else None
    # Fused versions of other libraries compute the same.
    low = name.lower()
    return "AdamW" if "adamw" in low else "Adam" if "adam" in low and "max" not in low else None


def _accepted(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    taken = inspect.signature(getattr(torch.optim, kind).__init__).parameters
    leave = {"params", "lr", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name in taken and name not in leave
    }


@final
class Replay:
    """The sampled elements of a trace's first steps, to try rules on; of all parameters, unless some are named."""

    def __init__(self, trace: Trace, steps: int, names: list[str] | None = None) -> None:
        self.steps = min(trace.steps, steps)
        self.names = trace.parameters if names is None else names
        held = [trace.parameters.index(name) for name in self.names]
        self.trace = trace
        self.norm = trace.gradient_norm[: self.steps, 0]
        self._weights = trace.weights[: self.steps + 1, 0, held, ELEMENTS]
        self._gradients = trace.gradients[: self.steps, 0, held, ELEMENTS]
        self._absent = trace.gradients[: self.steps, 0, held, SQUARE] == ABSENT
        shapes = [trace.facts["parameters"][name]["shape"] for name in self.names]
        self._counts = [len(places(math.prod(shape))) for shape in shapes]
        same = bool((self._weights.float().double() == self._weights).all())
        self._dtype = torch.float32 if same else torch.float64
        self._rates = {
            name: at
            for at, group in enumerate((trace.facts.get("optimizer") or {}).get("groups", ()))
            for name in group.get("params", ())
        }
        self._tried: dict[str, Tensor] = {}

    def misfit(self, rule: Rule) -> Tensor:
        """Return how far each parameter's step is from the rule, ``(S, P)``, relative to what it moved.

        It is the median of the elements: where a rule is wrong, it is for most of them. NaN counts as infinite.
        """
        key = repr(rule)
        if key not in self._tried:
            after = self._stepped(rule)
            self._tried[key] = self._off(after)
        return self._tried[key]

    def worst(self, rule: Rule) -> float:
        """Return the largest misfit of a step and parameter."""
        found = self.misfit(rule)
        return float(found.max()) if found.numel() else 0.0

    def narrowed(self, rule: Rule) -> Replay:
        """Return a replay of few parameters, to try many rules on: those that a rule fits least, and some of all."""
        if len(self.names) <= 2 * _FEW:
            return self
        worst = self.misfit(rule).amax(0).argsort(descending=True, stable=True)[:_FEW].tolist()
        places_ = sorted({*worst, *range(0, len(self.names), -(-len(self.names) // _FEW))})
        return Replay(self.trace, self.steps, [self.names[at] for at in places_])

    def fits(self, rule: Rule) -> bool:
        """Return whether the rule was followed."""
        return self.worst(rule) <= FIT

    def _off(self, after: Tensor) -> Tensor:
        before, target = self._weights[:-1], self._weights[1:]
        rounding = _LAST_BITS * torch.maximum(before.abs(), target.abs())
        off = ((after - target).abs() - rounding).clamp_min(0.0)
        moved = torch.maximum((after - before).abs(), (target - before).abs())
        held = torch.arange(off.shape[2]) < torch.tensor(self._counts).unsqueeze(1)
        scale = (moved.square() * held).sum(2).sqrt() / torch.tensor(self._counts).clamp_min(1).sqrt()
        median = off.masked_fill(~held, torch.nan).nanmedian(2).values
        return torch.where(median == 0, 0.0, (median / scale).nan_to_num(torch.inf, torch.inf))

    def _stepped(self, rule: Rule) -> Tensor:
        """Return the elements after each step by the rule, each step from the recorded ones."""
        after = self._weights[:-1].clone()
        for group, places_ in self._bundles(rule).items():
            settings, rate, absent = group
            value = torch.nn.Parameter(self._weights[0, places_].to(self._dtype))
            made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, rule.kind)
            optimizer = made([value], lr=1.0, foreach=False, **rule.groups[settings])
            for step in range(self.steps):
                if not bool(self.trace.applied[step]):
                    continue
                value.data.copy_(self._weights[step, places_])
                value.grad = None
                if not absent[step] or rule.zeros or rule.everywhere:
                    value.grad = (self._gradients[step, places_] * self._factor(rule, step)).to(self._dtype)
                optimizer.param_groups[0]["lr"] = float(self.trace.rates[step, rate])
                optimizer.step()
                after[step, places_] = value.detach().double()
        return after

    def _bundles(self, rule: Rule) -> dict[tuple[int, int, tuple[bool, ...]], list[int]]:
        """Return parameters that are stepped together: of a group, with a rate, with gradients at the same steps."""
        settings = {name: at for at, names in enumerate(rule.members) for name in names}
        found: dict[tuple[int, int, tuple[bool, ...]], list[int]] = {}
        for place, name in enumerate(self.names):
            group = settings.get(name, 0 if rule.everywhere else None)
            if group is None:
                continue
            rate = self._rates.get(name, min(group, self.trace.rates.shape[1] - 1))
            found.setdefault((group, rate, tuple(self._absent[:, place].tolist())), []).append(place)
        return found

    def _factor(self, rule: Rule, step: int) -> float:
        if rule.max_norm is None:
            return rule.scale
        return rule.scale * min(1.0, rule.max_norm / (float(self.norm[step]) + 1e-6))
