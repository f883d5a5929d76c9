"""What kernels on the CPU take for themselves: as the planner counts it, and the peak of a process that runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardkit.bench._budget import check_supported, fix_allocator
from shardkit.errors import UnsupportedError
from shardkit.planner._ledger import Ledger
from shardkit.testing import run

MIB = 2**20

WANTED = {"input": [True, False, False], "weight": [False, True, False], "all": [True, True, True]}

LAST = "channels last"
CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of images": (lambda: nn.Conv2d(3, 64, 3, padding=1), (256, 3, 32, 32)),
    "with a stride": (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1), (1024, 16, 24, 24)),
    "to more channels": (lambda: nn.Conv2d(20, 40, 3, padding=1), (1024, 20, 12, 12)),
    "to fewer channels": (lambda: nn.Conv2d(32, 7, 3, padding=1), (256, 32, 32, 32)),
    "of few channels": (lambda: nn.Conv2d(12, 7, 3, padding=1), (256, 12, 32, 32)),
    "of points": (lambda: nn.Conv2d(64, 64, 1), (512, 64, 12, 12)),
    "of lines": (lambda: nn.Conv1d(64, 64, 3, padding=1), (512, 64, 128)),
    "transposed": (lambda: nn.ConvTranspose2d(64, 32, 3, stride=2, padding=1), (256, 64, 12, 12)),
    LAST: (lambda: nn.Conv2d(64, 64, 3, padding=1), (512, 64, 12, 12)),
}


def backward(module: Any, gradient: Tensor, batch: Tensor, wanted: list[bool]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        gradient,
        batch,
        module.weight,
        [module.out_channels],
        module.stride,
        module.padding,
        module.dilation,
        module.transposed,
        module.output_padding,
        module.groups,
        wanted,
    )
    return found


def peaks(name: str, measure: Callable[[Callable[[], Any]], tuple[Any, int]]) -> dict[str, int]:
    """Return the most bytes that the forward of a convolution holds, and the backward of each kind."""
    make, shape = CONVOLUTIONS[name]
    with torch.no_grad():
        module, batch = make(), torch.ones(shape)
        if name == LAST:
            batch = batch.contiguous(memory_format=torch.channels_last)
        result, forward = measure(lambda: module(batch))
        found = {"forward": forward}
        gradient = torch.ones_like(result)
        for kind, wanted in WANTED.items():
            _, found[kind] = measure(lambda wanted=wanted: backward(module, gradient, batch, wanted))  # type: ignore[misc]
    return found


def planned(call: Callable[[], Any]) -> tuple[Any, int]:
    with Ledger(cpu=True) as ledger:
        result = call()
    return result, ledger.high


def measured(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call gives and what it makes the process hold at most, once libraries have what they keep."""
    call()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmHWM")
    result = call()
    return result, status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def really() -> dict[str, dict[str, int]]:
    fix_allocator()
    return {name: peaks(name, measured) for name in CONVOLUTIONS}


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, int]]:
    try:
        check_supported("cpu")
    except UnsupportedError as error:
        pytest.skip(str(error))
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's layouts are known here of processors with AVX-512")
    return run(really, processes=1, timeout=60)[0]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_holds_what_is_planned(name: str, real: dict[str, dict[str, int]]) -> None:
    with FakeTensorMode():
        found = peaks(name, planned)
    assert found == pytest.approx(real[name], rel=0.03, abs=MIB / 2)


def test_a_convolution_holds_its_output_twice_once_in_blocks_of_16_channels() -> None:
    batch, each = 10, 32 * 32 * 4
    with FakeTensorMode(), torch.no_grad(), Ledger(cpu=True) as ledger:
        module, images = nn.Conv2d(3, 20, 3, padding=1), torch.empty(batch, 3, 32, 32)
        before = ledger.now
        result = module(images)
        held = ledger.now - before
        assert ledger.high - before == batch * (20 + 32) * each
    assert 0 <= held - result.nbytes < 2 * 4096, "what it took for itself is gone"


def test_elsewhere_than_on_the_cpu_a_convolution_holds_its_output() -> None:
    with FakeTensorMode(), torch.no_grad():
        module, images = nn.Conv2d(3, 20, 3, padding=1), torch.empty(10, 3, 32, 32)
        with Ledger() as ledger:
            result = module(images)
    assert ledger.high == result.nbytes
