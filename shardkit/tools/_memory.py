"""How much memory training took, above what the process held before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """The peak above the memory in use when this was made, in bytes.

    On a GPU it is the peak of torch's allocator. On the CPU it is the peak resident set of the process, which also
    counts what the allocator keeps for later and what libraries hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    @classmethod
    def start(cls, device: torch.device) -> Self:
        """Give freed memory back to the system, and count from here."""
        gc.collect()
        peak = cls(device)
        if device.type == "cpu":
            with contextlib.suppress(OSError, AttributeError):  # glibc has it
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):  # Linux sets the peak back to the present
                Path("/proc/self/clear_refs").write_text("5")
            peak._base = _peak_resident()
        else:
            import torch

            module = torch.get_device_module(device)
            module.empty_cache()
            module.reset_peak_memory_stats(device)
            peak._base = module.memory_allocated(device)
        return peak

    def read(self) -> int:
        """Return the peak since the start."""
        if self._device.type == "cpu":
            return max(0, _peak_resident() - self._base)
        import torch

        return int(torch.get_device_module(self._device).max_memory_allocated(self._device)) - self._base


def _peak_resident() -> int:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    # In bytes on macOS, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
