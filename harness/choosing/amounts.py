"""Amounts as people write and read them: 24GiB, 512 MiB, 37 %."""

from __future__ import annotations

import math
import re

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


def parse_bytes(text: str) -> float:
    """`24GiB`, `512 MiB`, `80GB` or a plain number of bytes. ValueError, with what was given, for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or not float(match[1]) > 0:
        raise ValueError(f"expected an amount of memory such as 24GiB or 512MiB, got {text!r}")
    return float(match[1]) * factor


def mebibytes(num_bytes: float) -> str:
    """`178 MiB`, `1.4 GiB` from 10,000 MiB up, with three digits that matter."""
    mib = num_bytes / 2**20
    return f"{three_digits(mib / 1024)} GiB" if mib >= 10_000 else f"{three_digits(mib)} MiB"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def three_digits(value: float) -> str:
    """All digits from 100 up."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 100 else 0
    return f"{value:,.{min(decimals, 6)}f}"
