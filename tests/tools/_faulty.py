"""Distributions with backends that go wrong, written into a folder that is then put on the path."""

from __future__ import annotations

from pathlib import Path

FAULTY = '''
import os
from dataclasses import dataclass
from typing import Literal

import shardkit_ddp
from shardkit import Backend, Finding, Variant, hookimpl, option


@dataclass(frozen=True)
class Options:
    """Options."""

    mode: Literal["right", "wrong", "raise", "die"] = option("right", "how it goes wrong")


@hookimpl
def shardkit_describe():
    return Backend(
        name="faulty",
        summary="goes wrong",
        variants=(Variant(strategy="faulty", summary="as it is", shards=frozenset({"optimizer"})),),
        precisions=frozenset({"fp32", "bf16"}),
        options=Options,
    )


@hookimpl
def shardkit_prepare(model, optimizer, strategy, options):
    print("noise on stdout")
    if options.mode == "raise":
        raise ValueError("no room for it")
    if options.mode == "die" and os.environ["RANK"] == "1":
        os._exit(3)
    if options.mode == "wrong":
        optimizer.param_groups[0]["lr"] *= 1.001
    return shardkit_ddp.shardkit_prepare(model, optimizer, strategy, shardkit_ddp.DDPOptions())


@hookimpl
def shardkit_diagnose():
    return [Finding("faulty's check", "problem", "it leaks", "mend it")]
'''

ABSENT = """
from shardkit import Backend, Variant, hookimpl


@hookimpl
def shardkit_describe():
    return Backend(
        name="absent",
        summary="has no library",
        variants=(Variant(strategy="absent", summary="as it is"),),
        library="no_such_library",
        requires="no-such-library>=1.2",
        install='pip install "no-such-library>=1.2"',
    )


@hookimpl
def shardkit_prepare(model, optimizer, strategy, options):
    raise AssertionError
"""

BROKEN = "raise SystemExit(1)"


def write(folder: Path) -> Path:
    """Write the distributions and return the folder."""
    for name, code in {"faulty": FAULTY, "absent": ABSENT, "broken": BROKEN}.items():
        (folder / f"their_{name}.py").write_text(code)
        info = folder / f"their_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[shardkit.backends]\n{name} = their_{name}\n")
    return folder
