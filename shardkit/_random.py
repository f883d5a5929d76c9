"""The random generators of a process: seeded, saved and put back together."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, torch and, where it is loaded, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators, the device's included, as tensors, numbers and lists."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`get_random_state` returned on this device."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
