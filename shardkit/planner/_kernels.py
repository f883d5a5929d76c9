"""What kernels on the CPU take for themselves while they run, which no tensor shows.

A convolution in float32 or bfloat16 is oneDNN's, which computes in layouts of its own: channels in blocks of 16, the
last one filled up, or channels last. Torch copies what lies otherwise to and fro, whole. The rules below are those of
torch 2.13 with oneDNN on x86 with AVX-512 (``ONEDNN_VERBOSE=1`` tells the layouts), found and checked by the peak of
the process around single calls. Other kernels' memory is small, or of a size that doesn't grow with the batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK = 16
"""Channels in a block: floats in a vector of AVX-512."""

_IMAGE = 3
"""Inputs of so few channels are read as they lie."""

_DTYPES = (torch.float32, torch.bfloat16)


def taken(function: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the most bytes that this call held beside its arguments, its results among them; 0 if that was no more."""
    if function is torch.ops.aten.convolution.default:
        return _forward(*args, result=result)
    if function is torch.ops.aten.convolution_backward.default:
        return _backward(*args)
    return 0


class _Image(NamedTuple):
    """Input or output of a convolution: its bytes as it is, and with channels in blocks."""

    channels: int
    plain: int
    blocks: int
    half_blocks: int


def _image(value: Tensor) -> _Image:
    channels = value.shape[1]
    each = value.numel() // max(channels, 1) * value.element_size()
    half = _BLOCK // 2
    blocks, halves = (-(-channels // block) * block * each for block in (_BLOCK, half))
    return _Image(channels, channels * each, blocks, halves)


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *_: Any,
    result: Tensor,
) -> int:
    if not _copied(input, weight):
        return 0
    x, y = _image(input), _image(result)
    return _spread(x, y) if transposed else _gathered(x, y)


def _backward(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> int:
    if not _copied(input, weight):
        return 0
    x, y = _image(input), _image(gradient)
    most = kept = 0
    if wanted[0]:
        kept = x.plain
        if transposed:
            most = _gathered(y, x)
        elif math.prod(stride) > 1:
            most = _spread(y, x)
        else:
            most = max(y.blocks + x.blocks, x.blocks + x.plain)
    if wanted[1]:
        # The input's gradient is there by then.
        most = max(most, kept + _both(x, y))
    return most


def _gathered(x: _Image, y: _Image) -> int:
    """From x to y as a convolution does: copies of both in blocks, then y in blocks and as torch has it."""
    return max((x.blocks if x.channels >= _BLOCK else 0) + y.blocks, y.blocks + y.plain)


def _spread(x: _Image, y: _Image) -> int:
    """From x to y as the backward of one with a stride does: channels last, of which torch makes y by two copies."""
    return max(x.plain + y.plain, 3 * y.plain)


def _both(x: _Image, y: _Image) -> int:
    """Copies of input and output for the gradient of the weights."""
    if x.channels <= _IMAGE:
        return y.blocks
    return x.blocks + y.blocks if x.channels >= _BLOCK else x.half_blocks + y.half_blocks


def _copied(input: Tensor, weight: Tensor) -> bool:
    """Return whether torch hands the convolution to oneDNN in a layout that isn't oneDNN's."""
    return (
        torch.backends.mkldnn.is_available()
        and input.dtype in _DTYPES
        and not any(
            value.dim() == dims and value.is_contiguous(memory_format=last) and not value.is_contiguous()
            for value in (input, weight)
            for dims, last in ((4, torch.channels_last), (5, torch.channels_last_3d))
        )
    )
