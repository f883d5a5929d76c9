"""Which errors are for want of memory, told from their texts, their kinds and the numbers."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardkit.bench import _budget
from shardkit.bench._budget import refused_bytes
from shardkit.bench._trials import Trial
from shardkit.errors import TrialError, UnsupportedError

MIB = 2**20
BUDGET = 100 * MIB


def allocator(asked: int) -> RuntimeError:
    return RuntimeError(
        f"[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        f"allocate {asked} bytes. Error code 12 (Cannot allocate memory)"
    )


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def handling(error: Exception, handled: Exception) -> Exception:
    error.__context__ = handled
    return error


def test_the_allocators_own_error_counts_if_what_it_asked_for_was_not_left() -> None:
    assert refused_bytes(allocator(21 * MIB), 80 * MIB, BUDGET) == 21 * MIB
    assert refused_bytes(allocator(19 * MIB), 80 * MIB, BUDGET) is None


def test_what_the_heap_grows_by_on_top_of_a_small_block_counts() -> None:
    kib = 2**10
    assert refused_bytes(allocator(64 * kib), BUDGET - 84 * kib, BUDGET) == 64 * kib
    assert refused_bytes(allocator(64 * kib), BUDGET - 256 * kib, BUDGET) is None


def test_without_a_budget_what_the_machine_has_left_counts() -> None:
    assert refused_bytes(allocator(2**62), 0, None) == 2**62
    assert refused_bytes(allocator(64), 0, None) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_are_of_memory_by_kind_count(error: Exception) -> None:
    assert refused_bytes(error, 0, BUDGET) == 0


def test_what_numpy_and_torch_could_not_allocate_is_told() -> None:
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**60, dtype=np.uint8)
    assert refused_bytes(caught.value, 0, BUDGET) == 2**60
    device = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 24 GiB"
    )
    assert refused_bytes(device, 0, BUDGET) == 3 * 2**29


@pytest.mark.parametrize(
    "text",
    ["std::bad_alloc", "could not create a primitive", "could not execute a primitive", "can't start new thread"],
)
def test_what_libraries_say_without_a_number_counts_when_the_budget_was_nearly_used_up(text: str) -> None:
    assert refused_bytes(RuntimeError(text), 60 * MIB, BUDGET) == 0
    assert refused_bytes(RuntimeError(text), 40 * MIB, BUDGET) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99999999999 bytes"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOENT, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_a_text_alone_says_nothing(error: BaseException) -> None:
    assert refused_bytes(error, 99 * MIB, BUDGET) is None


def test_the_cause_of_an_error_counts_and_what_was_handled_when_it_was_raised() -> None:
    assert refused_bytes(caused(ValueError("failed"), MemoryError()), 0, BUDGET) == 0
    assert refused_bytes(handling(ValueError("failed"), allocator(BUDGET)), MIB, BUDGET) == BUDGET
    deep = caused(ValueError("failed"), handling(KeyError("a"), MemoryError()))
    assert refused_bytes(ExceptionGroup("several", [KeyError("b"), deep]), 0, BUDGET) == 0
    ring = ValueError("a")
    ring.__context__ = caused(KeyError("b"), ring)
    assert refused_bytes(ring, 0, BUDGET) is None


LIMITED = """
import torch
from shardkit.bench import _budget
_budget.fix_allocator()
torch.set_num_threads(1)  # the stack of another thread is of the data too
torch.zeros(1)
memory = _budget.memory(torch.device("cpu"))
memory.limit(64 * 2**20)
kept = torch.zeros(40 * 2**20, dtype=torch.uint8)
assert 40 * 2**20 <= memory.reserved() < 42 * 2**20, memory.reserved()
assert 39 * 2**20 < memory.held() < 42 * 2**20, memory.held()
before = memory.in_use()
try:
    torch.zeros(60 * 2**20, dtype=torch.uint8)
except RuntimeError as error:
    assert _budget.refused_bytes(error, memory.reserved(), 64 * 2**20) == 60 * 2**20
else:
    raise SystemExit("nothing was refused")
assert abs(memory.in_use() - before) < 2**16
memory.lift()
torch.zeros(60 * 2**20, dtype=torch.uint8)
assert memory.reserved() > 99 * 2**20
assert memory.peak() > 99 * 2**20
"""


def test_beyond_the_budget_the_kernel_refuses_until_the_limit_is_lifted() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_that_start_take_little_of_a_budget() -> None:
    """A group of gloo's is three threads, of each of which the system would reserve 8 MiB that nobody touches."""
    code = (
        "import tempfile, torch, torch.distributed as dist\n"
        "from shardkit.bench import _budget\n"
        "_budget.fix_allocator()\n"
        "torch.set_num_threads(1)\n"
        "memory = _budget.memory(torch.device('cpu'))\n"
        "file = tempfile.NamedTemporaryFile()\n"
        "dist.init_process_group('gloo', init_method=f'file://{file.name}', rank=0, world_size=1)\n"
        "assert memory.reserved() < 8 * 2**20, memory.reserved()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_limit_of_the_system_below_the_budget_is_said() -> None:
    code = (
        "import resource, torch\n"
        "from shardkit.bench import _budget\n"
        "memory = _budget.memory(torch.device('cpu'))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))\n"
        "memory.limit(2**33)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "may hold 4 GiB of data (ulimit -d), which is below the budget of 8 GiB" in done.stderr


def test_where_no_limit_holds_there_is_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="can be held to on cpu and cuda, not on mps"):
        _budget.check_supported("mps")
    _budget.check_supported("cpu")
    _budget.check_supported("cuda")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="needs Linux with glibc"):
        _budget.check_supported("cpu")


def test_a_trial_raises_what_went_wrong_unless_it_fits_or_lacks_memory() -> None:
    for outcome in ("fits", "out of memory"):
        trial = Trial(2, 1, None, outcome)  # type: ignore[arg-type]
        assert trial.check() is trial
    with pytest.raises(UnsupportedError, match="not that"):
        Trial(2, 1, None, "refused", note="not that", kind="UnsupportedError").check()
    note = f"rank 1 was ended by {signal.SIGSEGV.name}"
    with pytest.raises(TrialError, match="batch 2: rank 1 was ended by SIGSEGV") as caught:
        Trial(2, 1, None, "died", note=note, rank=1, details="where").check()
    assert (caught.value.batch, caught.value.rank, caught.value.traceback) == (2, 1, "where")
