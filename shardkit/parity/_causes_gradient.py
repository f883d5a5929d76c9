"""Causes that show in the gradients or losses of the step where two runs part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardkit.parity._case import Case
from shardkit.parity._factors import is_about, readings, rounded
from shardkit.parity._results import Diagnosis
from shardkit.parity._roundoff import LOSS, SHARE
from shardkit.parity._sketch import ELEMENTS, SQUARE, SUMS, norm_of_sums

_CONSTANT = 1e-3
"""How far gradients may be from a multiple of the others', to be called one: far below what another cause leaves."""

_MOST_DIGITS = 12
"""Significant binary digits of fp16 and tf32, and one for the sum over two ranks; bf16 has 8."""


def scales(case: Case) -> Iterator[Diagnosis]:
    """Gradients, or losses alone, that are a multiple of the other run's."""
    parting = case.parting
    if parting is None or parting.quantity not in ("loss", "gradient", "gradient norm"):
        return
    step = parting.step - 1
    apart = case.bound.gradient[step]
    losses = [float(value[step]) for value in case.pair.loss]
    loss_factor = losses[1] / losses[0] if losses[0] and bool(case.bound.loss[step]) else 1.0
    if not bool(apart.any()):
        yield from _loss_scale(case, step, loss_factor)
        return
    factor = _factor(case, step, apart)
    # What is closer to one than the gradients are to a multiple is none.
    if factor is None or abs(factor - 1) < 10 * _CONSTANT:
        return
    rest = ~apart & (case.pair.gradient_norms[0][step] > SHARE * case.pair.gradient_norm[0][step])
    scope = (
        "the gradients of run B are" if not bool(rest.any()) else f"the gradients of {_names(case, apart)} in run B are"
    )
    evidence = {"step": parting.step, "factor": rounded(factor), "parameters": int(apart.sum())}
    if loss_factor != 1.0:
        evidence["loss factor"] = rounded(loss_factor)
    possible = readings(case, factor)
    for reading in possible:
        others = [other.words for other in possible if other.words != reading.words]
        sentence = f"{scope} run A's times {reading.words}" + (f", or {' or '.join(others)}" if others else "")
        yield Diagnosis(reading.name, sentence, evidence, "likely" if len(possible) > 1 else "certain")
    if possible:
        return
    acted = _clipped_before(case, step, factor)
    if acted is not None:
        yield acted
    elif loss_factor != 1.0 and is_about(loss_factor, factor) and _whole(factor):
        words = f"times {rounded(factor):g}" if factor > 1 else f"over {rounded(1 / factor):g}"
        yield Diagnosis(
            "sum instead of mean",
            f"the loss of run B and its gradients are run A's {words}: one run adds up over samples or tokens what "
            "the other averages",
            evidence,
            "likely",
        )
    else:
        yield Diagnosis("gradient scale", f"{scope} run A's times {rounded(factor):g}", evidence)


def low_precision(case: Case) -> Iterator[Diagnosis]:
    """Gaps as bf16, fp16 or tf32 leave them, in all parameters alike."""
    parting, pair = case.parting, case.pair
    told = [(trace.facts.get("settings") or {}).get("precision", "fp32") for trace in (pair.a, pair.b)]
    if parting is None or parting.quantity not in ("loss", "gradient", "gradient norm"):
        return
    step = parting.step - 1
    norms, apart = pair.gradient_norms[0][step], pair.gradient_apart[step]
    counted = norms > SHARE * pair.gradient_norm[0][step]
    gaps = (apart / norms)[counted]
    if not len(gaps) or not bool(torch.isfinite(gaps).all()):
        return
    middle, loss = float(gaps.median()), float(pair.loss_gap[step])
    low = told[0] != told[1]
    # A rounding to 8 digits leaves 2**-9 of a number, and more of what is made of many such.
    if not (
        2.0**-14 < middle < (0.5 if low else 0.1) and loss < 0.1 and bool((gaps > 0.02 * middle).double().mean() > 0.9)
    ):
        return
    evidence = {"step": parting.step, "loss": rounded(loss), "median gap of gradients": rounded(middle)}
    if low:
        parted = f"their gradients part by {middle:.1e} in all parameters"
        sentence = f"run A computes in {told[0]} and run B in {told[1]}: {parted}"
        yield Diagnosis("lower precision", sentence, evidence)
        return
    if told[0] != "fp32":
        return
    digits = [_digits(trace[step]) for trace in (pair.gradients[0], pair.gradients[1])]
    for side, own, other in (("b", digits[1], digits[0]), ("a", digits[0], digits[1])):
        if own <= _MOST_DIGITS < other - 2:
            kind = "bf16" if own <= 8 else "bf16, fp16 or tf32"
            digits_told = f"{own} binary digits, as of {kind}, where the facts tell of {told[0]}"
            sentence = f"the gradients of run {side.upper()} have {digits_told}"
            yield Diagnosis("lower precision", sentence, evidence | {"binary digits": own})
            return
    if parting.step == 1:
        sentence = (
            f"the gradients part by {middle:.1e} in all parameters from the first step on, as in bf16, fp16 or tf32"
        )
        yield Diagnosis("lower precision", sentence, evidence, "likely")


def _factor(case: Case, step: int, these: Tensor) -> float | None:
    """Return the factor from a's gradients to b's, of the parameters that part; None if one doesn't explain them."""
    one, other = (value[step, :, these, 1:] for value in case.pair.gradients)
    if not bool(torch.isfinite(one).all() & torch.isfinite(other).all()):
        return None
    below = float((one * one).sum())
    factor = float((one * other).sum()) / below if below else 0.0
    if factor <= 0:
        return None
    sums = slice(SUMS.start - 1, SUMS.stop - 1)
    rest = norm_of_sums((other - factor * one)[..., sums]).amax(0)
    norms = case.pair.gradient_norms[1][step]
    scale = torch.maximum(norms[these], SHARE * case.pair.gradient_norm[1][step])
    return factor if float((rest / scale).max()) < _CONSTANT else None


def _loss_scale(case: Case, step: int, factor: float) -> Iterator[Diagnosis]:
    """Yield that losses are told as a multiple, where the gradients are the same."""
    one, other = (value[: step + 3] for value in case.pair.loss)
    steady = other[step:] / one[step:]
    if factor == 1.0 or not bool(((steady / factor - 1).abs() < 100 * LOSS).all()):
        return
    evidence = {"step": step + 1, "factor": rounded(factor)}
    possible = readings(case, factor)
    words = " or ".join(dict.fromkeys(reading.words for reading in possible)) or f"{rounded(factor):g}"
    yield Diagnosis(
        "loss scale",
        f"the losses of run B are run A's times {words}, and the gradients are the same: only what is told of the loss "
        "differs",
        evidence,
    )


def _clipped_before(case: Case, step: int, factor: float) -> Diagnosis | None:
    """Return that the gradients were clipped before they were recorded, where their norm is a limit that is known."""
    norms = [float(value[step]) for value in case.pair.gradient_norm]
    small, name, side = (norms[1], "clipping acted", "b") if factor < 1 else (norms[0], "clipping did not act", "a")
    for trace in (case.pair.a, case.pair.b):
        limit = (trace.facts.get("settings") or {}).get("max_grad_norm")
        if limit and is_about(small, limit):
            evidence = {"step": step + 1, "max_norm": limit, "factor": rounded(factor)}
            where = f"the gradients of run {side.upper()}"
            sentence = f"{where} are clipped to norm {limit:g} before they are averaged or recorded"
            return Diagnosis(name, sentence, evidence, "likely")
    return None


def _whole(factor: float) -> bool:
    large = max(factor, 1 / factor)
    return large > 1.5 and abs(large - round(large)) < 1e-3 * large


def _names(case: Case, which: Tensor, most: int = 3) -> str:
    names = [case.pair.names[at] for at in which.nonzero().flatten().tolist()]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _digits(values: Tensor) -> int:
    """Return how many significant binary digits nine in ten of the sampled elements have at most."""
    held = values[..., ELEMENTS][values[..., SQUARE] > 0].flatten()
    held = held[held != 0]
    if not len(held):
        return 24
    mantissa = torch.frexp(held.float()).mantissa.abs().double() * 2.0**24
    zeros = torch.zeros_like(mantissa)
    for bit in range(1, 24):
        zeros += (torch.remainder(mantissa, 2.0**bit) == 0).double()
    return int((24 - zeros).quantile(0.9))
