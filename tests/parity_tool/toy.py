"""A third party's backend with no code for the parity tools, over a library that has a fault for each of its modes."""

from __future__ import annotations

from pathlib import Path

from tests.parity_tool.packages import install, wheel

_LIBRARY = """
import os, signal, sys, time
import torch.distributed as dist

__version__ = {version!r}
FAULTY = {faulty}
{start}

class Averager:
    def __init__(self, bucket=16, overlap=False):
        self.bucket, self.overlap = bucket, overlap

    def average(self, gradient):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())

class Default(Averager):
    def __init__(self, bucket=32 if FAULTY else 16, overlap=False):
        super().__init__(bucket, overlap)

class Sum(Averager):
    def average(self, gradient):
        dist.all_reduce(gradient)

class Race(Averager):
    def average(self, gradient):
        super().average(gradient)
        gradient.mul_(1 + os.urandom(1)[0] / 1000)

class Crash(Averager):
    def average(self, gradient):
        os.kill(os.getpid(), signal.SIGSEGV)

class Error(Averager):
    def average(self, gradient):
        raise ValueError("no such bucket")

class Hang(Averager):
    def average(self, gradient):
        time.sleep(1000)

def averager(mode):
    kind = globals()[mode.capitalize()] if mode != "same" else Averager
    return kind() if FAULTY or mode == "default" else Averager()
"""

_PLUGIN = """
from dataclasses import dataclass
from shardkit import Backend, Engine, Update, Variant, hookimpl, option


@dataclass(frozen=True)
class ToyOptions:
    mode: str = option("same", "which of the library's averagers")


class ToyEngine(Engine):
    def __init__(self, model, optimizer, averager):
        self.model, self.optimizer, self._step, self._averager = model, optimizer, optimizer.step, averager

    def backward(self, loss, gradient, *, last):
        loss.backward(gradient)
        if last:
            for value in self.model.parameters():
                if value.grad is not None:
                    self._averager.average(value.grad)

    def step(self):
        self._step()
        self.model.zero_grad()
        return Update(True)

    def full_gradients(self):
        held = {name: value.grad for name, value in self.model.named_parameters()}
        return {name: value.clone() for name, value in held.items() if value is not None}


@hookimpl
def shardkit_describe():
    return Backend(
        name="toy",
        summary="averages gradients, one by one",
        library="toylib",
        requires="toylib>=1.0",
        options=ToyOptions,
        variants=tuple(
            Variant(strategy=f"toy:mode={mode}", summary="averages gradients, one by one")
            for mode in ("same", "default", "sum", "race", "crash", "error")
        ),
    )


@hookimpl
def shardkit_prepare(model, optimizer, strategy, options):
    import toylib

    return ToyEngine(model, optimizer, toylib.averager(options.mode))
"""

# Whether each version has the faults of its modes, and what it does when it is imported.
VERSIONS = {
    "1.0": (False, ""),
    "1.1": (False, ""),
    "1.2": (False, "raise SystemExit('pip install something')"),
    "2.0": (True, ""),
    "3.0": (True, "time.sleep(1000)"),
}


def make(index: Path, site: Path, *, installed: str = "1.0") -> None:
    """Put all versions of the library into a folder that pip installs from, and one and the plugin into another."""
    for version, (faulty, start) in VERSIONS.items():
        code = _LIBRARY.format(version=version, faulty=faulty, start=start)
        made = wheel(index, "toylib", version, files={"toylib/__init__.py": code})
        if version == installed:
            install(made, site)
    points = "[shardkit.backends]\ntoy = toy_plugin\n"
    files = {"toy_plugin.py": _PLUGIN, "toy_plugin-0.1.dist-info/entry_points.txt": points}
    install(wheel(site.parent / "wheels", "toy_plugin", "0.1", files=files), site)
