"""What the tools find: plain data, for the terminal, JSON, JUnit and HTML alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardkit.parity._trace import Trace


@dataclass(frozen=True)
class Difference:
    """Something that makes two runs not, or not quite, comparable; or a setting that explains why they part.

    ``kind`` is ``"model"``, ``"length"``, ``"data"``, ``"start"`` (the weights before the first step), ``"seed"``,
    ``"strategy"``, ``"optimizer"``, ``"world size"``, ``"configuration"``, ``"version"``, ``"environment"`` or
    ``"device"``. ``what`` is the setting's name. A side that lacks it has None, and ``missing`` says which: ``"a"``,
    ``"b"`` or ``""``.
    """

    kind: str
    what: str
    a: Any = None
    b: Any = None
    missing: str = ""


@dataclass(frozen=True)
class Parting:
    """Where two runs part first.

    ``quantity`` is ``"data"``, ``"weights before the first step"``, ``"loss"``, ``"gradient"``, ``"gradient norm"``,
    ``"learning rate"``, ``"applied"`` or ``"weight"``; ``parameter`` the parameter or the group, where it is of one.
    ``step`` counts from 1. ``relative`` is the difference over a's value, of a tensor in L2 norms. ``ulps`` is how many
    float32 numbers lie between two single values; None for tensors. ``rank`` is the one on which it is seen, if not on
    all. ``count`` is how many parameters part there, of those the named one the furthest; 0 for what is of none.
    """

    step: int
    quantity: str
    parameter: str = ""
    a: float | None = None
    b: float | None = None
    relative: float = 0.0
    ulps: float | None = None
    rank: int | None = None
    count: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """A cause that the numbers bear out.

    ``name`` is one of a fixed list, for machines; ``sentence`` tells a reader what was done wrong and where;
    ``evidence`` are the numbers that say so; ``confidence`` is ``"certain"`` where they leave no other reading of the
    known ones, else ``"likely"``.
    """

    name: str
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    confidence: Literal["certain", "likely"] = "certain"


@dataclass(frozen=True)
class Gaps:
    """How far apart two runs are at each step, relative to run a; in steps that both have.

    ``parameters`` are rows of one per step, of the weights after it and of the gradients in it, for each parameter of
    ``names``.
    """

    loss: list[float]
    gradient_norm: list[float]
    gradients: list[float]
    weights: list[float]
    names: list[str]
    parameter_gradients: list[list[float]]
    parameter_weights: list[list[float]]


@dataclass(frozen=True)
class Comparison:
    """Two traces, compared.

    ``verdict`` is ``"identical"`` (to the last bit of what was recorded), ``"round-off"`` (they part by no more than
    the order of additions does), ``"different"``, or ``"incomparable"`` (of other models, or nothing in common).
    ``first_bit`` is where the first bit differs, ``parting`` where they differ by more than round-off.
    """

    a: str
    b: str
    verdict: Literal["identical", "round-off", "different", "incomparable"]
    differences: list[Difference]
    first_bit: Parting | None
    parting: Parting | None
    diagnoses: list[Diagnosis]
    gaps: Gaps | None
    loss_a: list[float]
    loss_b: list[float]
    final_weights: float | None
    """The L2 norm of the difference of the weights at the end, over that of a's; None where a trace lacks them."""
    final_ulps: float | None
    """The largest difference of a weight at the end, in units of the last place of the largest of its tensor."""

    @property
    def exit_code(self) -> int:
        """0 if the runs are the same but for round-off, 1 if they differ; 2 if they can't be compared, or one has more
        steps than the other and those that both have are the same."""
        code = {"identical": 0, "round-off": 0, "different": 1, "incomparable": 2}[self.verdict]
        return 2 if code == 0 and len(self.loss_a) != len(self.loss_b) else code


@dataclass(frozen=True)
class Failure:
    """Why something could not run.

    ``stage`` is ``"install"``, ``"import"``, ``"refused"`` (an error of shardkit's), ``"error"``, ``"crash"``,
    ``"timeout"``. ``headline`` is one line, ``details`` all that was printed.
    """

    stage: str
    headline: str
    details: str = ""


@dataclass(frozen=True)
class Distances:
    """How far a run is from the float64 reference, relative to it: the largest over the steps."""

    loss: float
    gradient_norm: float
    weights: float
    """At the end: the L2 norm of the difference, over that of what training moved."""
    loss_ulps: float
    """The largest difference of a loss, in units of the last place of float32."""


@dataclass(frozen=True)
class Measured:
    """One strategy in one environment, run several times in fresh processes."""

    failure: Failure | None = None
    runs: int = 0
    repeatable: bool | None = None
    """Whether equal runs are the same to the last bit; None where there was but one."""
    self_comparison: Comparison | None = None
    """Of two runs that aren't the same: the pair that is furthest apart."""
    distances: Distances | None = None
    """From the reference: the largest of any run."""
    parity: bool | None = None
    """Whether it is no further from the reference than the stated factor allows; None where there is no reference."""
    step_seconds: list[float] = field(default_factory=list)
    """Of each run, the median time of a step, the slowest rank's."""
    samples_per_second: float | None = None
    peak_memory: list[int] = field(default_factory=list)
    """Bytes of each rank above what the process held before: the median over the runs."""
    trace: Trace | None = field(default=None, repr=False)
    """That of the first run."""


@dataclass(frozen=True)
class Row:
    """One strategy, on one side or on both.

    ``control`` says that the library was driven by itself, without shardkit's plugin. ``verdict`` is ``"same"``
    (identical), ``"round-off"``, ``"different"``, ``"could not run"``, ``"refused"`` (in the same words on both sides:
    nothing changed), and where there is one side ``"parity"``, ``"no parity"`` or ``"unjudged"``.
    """

    strategy: str
    control: bool
    verdict: str
    reason: str
    before: Measured
    after: Measured | None = None
    comparison: Comparison | None = None
    changed: list[Difference] = field(default_factory=list)
    """Settings whose resolved value changed from one side to the other."""
    speed_ratio: float | None = None
    """After over before, in samples per second."""
    speed_spread: float | None = None
    """How far the ratio of two equal runs would go, from the spread of the repeats: 0.1 is 10 %."""
    memory_ratio: float | None = None


@dataclass(frozen=True)
class Side:
    """An environment: what was asked for, what it has, and how it came to be."""

    name: str
    wanted: dict[str, str]
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None
    baseline: Measured | None = None
    """Plain data-parallel torch on the same work: its own distance is what all others are held to."""


@dataclass(frozen=True)
class Report:
    """A suite (one side) or an upgrade (two)."""

    kind: Literal["run", "upgrade"]
    settings: dict[str, Any]
    sides: list[Side]
    rows: list[Row]
    exit_code: int
    summary: str
