"""A third party's backend with no code for the parity tools, over a library that comes in many versions."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.parity_tool.packages import install, wheel

_LIBRARY = """
import os, signal, sys, time
import torch.distributed as dist

__version__ = "{version}"
{start}

class Averager:
    def __init__(self, bucket={bucket}, overlap=False):
        self.bucket, self.overlap, self.calls = bucket, overlap, 0

    def average(self, gradient):
        self.calls += 1
        {before}
        dist.all_reduce(gradient)
        gradient.div_({divisor})
        {after}
"""

_PLUGIN = """
import torch.distributed as dist
from shardkit import Backend, Engine, Update, Variant, hookimpl


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
        variants=(Variant(strategy="toy", summary="averages gradients, one by one"),),
    )


@hookimpl
def shardkit_prepare(model, optimizer, strategy, options):
    import toylib

    return ToyEngine(model, optimizer, toylib.Averager())
"""

# Each version, and what is other in it than in 1.0.
VERSIONS: dict[str, dict[str, str]] = {
    "1.0": {},
    "1.1": {},
    "1.2": {"bucket": "32"},
    "1.3": {"divisor": "1"},
    "1.4": {"start": "raise SystemExit('pip install something')"},
    "1.6": {"before": "os.kill(os.getpid(), signal.SIGSEGV)"},
    "1.7": {"after": "gradient.mul_(1 + os.urandom(1)[0] / 1000)"},
    "1.8": {"before": "raise ValueError('no such bucket')"},
    "1.9": {},
    "2.0": {"divisor": "dist.get_world_size() ** 0.5"},
    "2.1": {"divisor": "dist.get_world_size() ** 0.5"},
    "3.0": {"before": "time.sleep(1000)"},
    "3.1": {"start": "time.sleep(1000)"},
}


def make(index: Path, site: Path, *, installed: str = "1.0") -> None:
    """Put all versions of the library into a folder that pip installs from, the plugin and one of them into another."""
    plain = {"start": "", "bucket": "16", "before": "pass", "divisor": "dist.get_world_size()", "after": "pass"}
    for version, other in VERSIONS.items():
        code = textwrap.dedent(_LIBRARY).format(version=version, **{**plain, **other})
        made = wheel(index, "toylib", version, files={"toylib/__init__.py": code})
        if version == installed:
            install(made, site)
    points = "[shardkit.backends]\ntoy = toy_plugin\n"
    files = {"toy_plugin.py": _PLUGIN, "toy_plugin-0.1.dist-info/entry_points.txt": points}
    install(wheel(site.parent / "wheels", "toy_plugin", "0.1", files=files), site)
