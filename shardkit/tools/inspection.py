"""What checkpoints hold, as text: for ``shardkit inspect``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.tools.listing import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from shardkit.checkpoints import Inspection


def facts(found: Inspection, *, tensors: bool) -> dict[str, Any]:
    """Return an inspection for JSON; without ``tensors`` they are counted only."""
    told = {**dataclasses.asdict(found), "path": str(found.path), "bytes": found.bytes}
    if not tensors:
        told["tensors"] = len(found.tensors)
    return told


def show(found: Sequence[Inspection], console: Console, *, tensors: bool) -> None:
    """Print all checkpoints in a table if there are several, what the last of them holds, and what is wrong."""
    from rich.text import Text

    if len(found) > 1:
        console.print(_overview(found))
    last = found[-1]
    console.print(Text(str(last.path), "bold"), soft_wrap=True)
    for what, told in _lines(last) if last.sizes else ():
        console.print(Text(f"  {what:24}{told}"), soft_wrap=True)
    for line in _tensors(last) if tensors else ():
        console.print(Text(line), soft_wrap=True)
    for one in found:
        if one.damage is not None:
            console.print(Text.assemble(("damaged: ", "bold red"), one.damage), soft_wrap=True)
    if not any(one.damage for one in found):
        total = size_text(sum(one.bytes for one in found))
        verified = all(one.verified for one in found)
        console.print(f"whole: {total} compared with their checksums" if verified else "not verified")


def _overview(found: Sequence[Inspection]) -> Any:
    """Return a table with a row for each checkpoint."""
    from rich.text import Text

    table = make_table("checkpoint", "step", "saved", "strategy", "ranks", "size", "state")
    for one in found:
        row = (one.path.name, _text(one.step), _text(one.saved), strategy(one), _text(one.world_size))
        table.add_row(*(Text(cell) for cell in (*row, size_text(one.bytes), verdict(one))))
    return table


def strategy(found: Inspection) -> str:
    """Return the strategy in the words in which users write one."""
    told = found.strategy
    options = dict(told.get("options") or {})
    for key, usual in (("precision", "fp32"), ("accumulate", 1)):
        if told.get(key, usual) != usual:
            options[key] = told[key]
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    return f"{told.get('backend', 'unknown')}{':' if listed else ''}{listed}"


def verdict(found: Inspection) -> str:
    """Return in a word how a checkpoint is."""
    if found.damage is not None:
        return "damaged"
    return "whole" if found.verified else "not verified"


def _lines(found: Inspection) -> list[tuple[str, str]]:
    """Return what a checkpoint holds, each with what it is."""
    ranks = "" if found.world_size is None else f" on {found.world_size} rank{'s' if found.world_size != 1 else ''}"
    skipped = f", {found.skipped_steps} skipped" if found.skipped_steps else ""
    told = [
        ("saved", f"{found.saved or 'unknown'}, after {_text(found.step)} steps{skipped}"),
        ("strategy", f"{strategy(found)}{ranks}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
        ("model", f"{found.model or 'unknown'}, {_text(found.parameters)} parameters"),
    ]
    if found.aliases:
        told.append(("tied", ", ".join(f"{name} = {first}" for name, first in found.aliases.items())))
    groups = [
        f"{group['parameters']} parameters"
        + "".join(f", {key} {group[key]}" for key in ("lr", "weight_decay", "momentum") if _plain(group.get(key)))
        for group in found.groups
    ]
    told += [
        ("optimizer", found.optimizer or ("unknown" if found.groups else "none")),
        *(("group", group) for group in groups),
        ("objects", ", ".join(found.objects) or "none"),
        ("state", ", ".join(found.state) or "none"),
    ]
    for file, size in found.sizes.items():
        count = sum(tensor.file == file for tensor in found.tensors)
        told.append((file, f"{count} tensors, {size_text(size)}"))
    return told


def _tensors(found: Inspection) -> list[str]:
    told: list[str] = []
    for file in found.sizes:
        rows = [
            (tensor.name, tensor.dtype, str(tensor.shape), size_text(tensor.bytes))
            for tensor in found.tensors
            if tensor.file == file
        ]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        padded = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        told += [f"{file}:", *(f"  {line.rstrip()}" for line in padded)]
    return told


def size_text(size: float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    place = 0
    while size >= 1024 and place < len(units) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.1f} {units[place]}" if place else f"{size:.0f} bytes"


def _plain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "unknown" if value is None else str(value)
