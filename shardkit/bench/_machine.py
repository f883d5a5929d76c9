"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Return the machine's processor, cores, memory in bytes, load and GPUs; what isn't known is left out."""
    import torch

    found: dict[str, Any] = {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        found["usable_cores"] = len(os.sched_getaffinity(0))
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
        found["gpus"] = [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus]
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
