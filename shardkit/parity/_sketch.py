"""A tensor in a few numbers: its norm, sums of its elements under random signs, and some elements as they are.

The sums are those of a count sketch (Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002):
each element goes to one of a few buckets with a sign that depends on its place alone. So a sketch is linear, that of a
difference is the difference of the sketches, and the squares of its buckets add up to about the square of its norm
(Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments", 1996). Parts of a tensor that lie
on several ranks are sketched where they lie, and added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, final

import torch
from torch import Tensor

BUCKETS = 16
SAMPLES = 16
WIDTH = 1 + BUCKETS + SAMPLES
"""Numbers in a sketch: the square of the norm, the buckets, the samples. A sample that isn't here is 0."""

SQUARE, SUMS, ELEMENTS = 0, slice(1, 1 + BUCKETS), slice(1 + BUCKETS, WIDTH)

ABSENT = -1.0
"""The square of the norm of a tensor that isn't there."""

_AT_ONCE = 2**18
"""How many elements are copied at once, to be sketched together."""

_PERIOD = 2**16
"""After how many elements the signs repeat. A multiple of the number of buckets."""


class Run(NamedTuple):
    """Elements of a tensor of ``numel``: ``size`` of them from place ``start`` on."""

    start: int
    size: int
    numel: int


@final
class Sketcher:
    """Sketches the same runs again and again: the small ones together, in a few operations."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self._runs = list(runs)
        self._device = device
        self._together: list[_Together] = []
        self._alone: list[int] = []
        group: list[int] = []
        size = 0
        for at, run in enumerate(self._runs):
            if run.start % _PERIOD + run.size > _PERIOD:
                self._alone.append(at)
                continue
            if size + run.size > _AT_ONCE and group:
                self._together.append(_Together(self._runs, group, device))
                group, size = [], 0
            group.append(at)
            size += run.size
        if group:
            self._together.append(_Together(self._runs, group, device))

    @torch.no_grad()
    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sketches, ``(runs, WIDTH)``, float64, of the runs' elements: a tensor of any shape for each.

        The sketch of a whole tensor is the sum of those of its runs.
        """
        rows = torch.zeros(len(self._runs), WIDTH, dtype=torch.float64, device=self._device)
        for group in self._together:
            group.sketch(values, rows)
        for at in self._alone:
            _sketch_alone(values[at].detach().reshape(-1), self._runs[at], rows[at])
        return rows


def sketch(values: Tensor, start: int = 0, numel: int | None = None) -> Tensor:
    """Return the sketch, ``(WIDTH,)``, of one run: of a whole tensor unless its place is told."""
    run = Run(start, values.numel(), values.numel() if numel is None else numel)
    return Sketcher([run], values.device)([values])[0]


class _Together:
    """Runs that are copied into one buffer, each from the beginning of a row: a column of it is a bucket."""

    def __init__(self, runs: Sequence[Run], members: Sequence[int], device: torch.device) -> None:
        self._members = list(members)
        signs = _signs(device, torch.float32)
        parts, owners, samples, slots = [], [], [], []
        self._places: list[tuple[int, int]] = []
        end = 0
        for number, at in enumerate(members):
            run = runs[at]
            offset = run.start % _PERIOD
            first = end + offset % BUCKETS
            rows = -(-(offset % BUCKETS + run.size) // BUCKETS)
            self._places.append((first, run.size))
            parts.append((first, signs[offset : offset + run.size]))
            owners += [number] * rows
            for slot, place in enumerate(places(run.numel)):
                if run.start <= place < run.start + run.size:
                    samples.append(first + place - run.start)
                    slots.append(number * SAMPLES + slot)
            end += rows * BUCKETS
        self._signs = torch.zeros(end, device=device)
        for first, part in parts:
            self._signs[first : first + len(part)] = part
        self._lengths = torch.bincount(torch.tensor(owners), minlength=len(members)).to(device)
        self._owners = torch.tensor(owners, dtype=torch.long, device=device)
        self._samples = torch.tensor(samples, dtype=torch.long, device=device)
        self._slots = torch.tensor(slots, dtype=torch.long, device=device)
        self._rows = torch.tensor(self._members, device=device)

    def sketch(self, values: Sequence[Tensor], rows: Tensor) -> None:
        mine = [values[at].detach().reshape(-1) for at in self._members]
        double = any(value.dtype == torch.float64 for value in mine)
        buffer = torch.zeros(len(self._signs), dtype=torch.float64 if double else torch.float32, device=rows.device)
        torch._foreach_copy_([buffer[first : first + size] for first, size in self._places], mine)
        found = rows.new_zeros(len(mine), WIDTH)
        found.view(-1).index_copy_(
            0, self._slots // SAMPLES * WIDTH + ELEMENTS.start + self._slots % SAMPLES, buffer[self._samples].double()
        )
        signed = buffer.mul_(self._signs).double().view(-1, BUCKETS)
        found[:, SUMS].index_add_(0, self._owners, signed)
        found[:, SQUARE] = torch.segment_reduce(signed.mul_(signed).sum(1), "sum", lengths=self._lengths)
        rows[self._rows] = found


def _sketch_alone(flat: Tensor, run: Run, row: Tensor) -> None:
    row[SQUARE] = torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    row[SUMS] = _folded_sums(flat, run.start % _PERIOD)
    inside = [(slot, place - run.start) for slot, place in enumerate(places(run.numel))]
    held = [(slot, place) for slot, place in inside if 0 <= place < run.size]
    if held:
        index = torch.tensor([place for _, place in held], device=flat.device)
        row[[ELEMENTS.start + slot for slot, _ in held]] = flat[index].double()


def places(numel: int) -> list[int]:
    """Return the places of the elements that a sketch of a tensor of ``numel`` elements holds, in order."""
    count = min(SAMPLES, numel)
    # One in each of as many equal parts, further in from part to part: not all in one column of a matrix.
    return [at * numel // count + 7 * at % (numel // count) for at in range(count)]


def _folded_sums(flat: Tensor, offset: int) -> Tensor:
    """Add up what has the same sign and bucket first: one pass over the elements, and no copy of them."""
    folded = torch.zeros(_PERIOD, dtype=torch.float64, device=flat.device)
    at = 0
    if offset:
        at = min(_PERIOD - offset, flat.numel())
        folded[offset : offset + at] += flat[:at]
    turns = (flat.numel() - at) // _PERIOD
    if turns:
        folded += flat[at : at + turns * _PERIOD].view(turns, _PERIOD).sum(0, dtype=torch.float64)
        at += turns * _PERIOD
    rest = flat.numel() - at
    if rest:
        folded[:rest] += flat[at:]
    return (folded * _signs(flat.device, torch.float64)).view(-1, BUCKETS).sum(0)


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(20210119)
    return (torch.randint(2, (_PERIOD,), generator=generator) * 2 - 1).to(device, dtype)


def norm_of_sums(sums: Tensor) -> Tensor:
    """Return about the norm of the tensor that the buckets are of; of a difference of sketches, that of the difference.

    With 16 buckets its relative standard deviation is about 1 / 16**0.5 x 0.7. It is 0 where all buckets are.
    """
    return sums.square().sum(-1).sqrt()
