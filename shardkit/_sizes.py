"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from shardkit.errors import InputError

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(size: int | str, what: str = "memory") -> int:
    """Return the bytes that a number, or text such as ``"24GiB"``, ``"512 MiB"`` or ``"8GB"``, stands for.

    ``what`` names the setting in errors. KiB, MiB, GiB and TiB are powers of 1024, KB, MB, GB and TB of 1000.

    Raises:
        InputError: it is neither, or not above 0.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InputError(f"{what} is a number of bytes or text such as '24GiB', not {size!r}")
    if isinstance(size, int):
        found = size
    else:
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if parts is None or parts[2].upper() not in _UNITS:
            raise InputError(
                f"{what} reads a number and a unit, B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as '24GiB', "
                f"not {size!r}"
            )
        whole, _, fraction = parts[1].partition(".")
        unit = _UNITS[parts[2].upper()]
        # Not through a float, in which the last bytes of a large number are lost.
        found = int(whole) * unit + int(fraction or "0") * unit // 10 ** len(fraction)
    if found < 1:
        raise InputError(f"{what} is above 0 bytes, not {size!r}")
    return found


def format_bytes(size: float) -> str:
    """Return bytes as text of three or four digits in the unit that fits, such as ``"1.5 GiB"``."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"
