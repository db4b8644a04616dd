"""Parses and prints sizes and times with units. Stored values are always bytes and nanoseconds."""

from __future__ import annotations

import math
import re

from overlapc.errors import ConfigError, shown

_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
MOST_BYTES = 2**62
MOST_NS = 1e18  # thirty years; the simulator's time grid still represents times this long
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ]*)\s*$")


def parse_count(text: str, most: int = MOST_BYTES) -> int:
    """Parse a whole number from 0 to `most`. ConfigError on anything else."""
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{shown(text)} is not a whole number")
    if len(text) > 30 or int(text) > most:  # Python limits the digits that `int` converts
        raise ConfigError(f"{shown(text)} is more than {most:,}")
    return int(text)


def parse_bytes(text: str | int | float) -> int:
    """Parse `"70GiB"` to bytes; a plain number is already bytes. ConfigError on anything else, and beyond 2**62."""
    size = _parse(text, _BYTES, "B", "a size", "70GiB")
    if not -MOST_BYTES <= size <= MOST_BYTES:  # also true for nan
        raise ConfigError(f"{shown(text)} is out of range for a size in bytes")
    return round(size)


def parse_ns(text: str | int | float) -> float:
    """Parse `"1180us"` to ns; a plain number is already ns. ConfigError on anything else, and beyond thirty years."""
    ns = _parse(text, _NS, "ns", "a time", "250us")
    if not -MOST_NS <= ns <= MOST_NS:
        raise ConfigError(f"{shown(text)} is out of range for a time (at most 30 years)")
    return ns


def _parse(
    text: str | int | float, units: dict[str, float] | dict[str, int], plain: str, what: str, like: str
) -> float:
    if isinstance(text, (int, float)):
        try:
            return float(text)
        except OverflowError:
            return math.inf
    match = _NUMBER.match(text) if isinstance(text, str) else None
    if match is None or (match[2] or plain) not in units:
        raise ConfigError(f"{shown(text)} is not {what}; write it like {like!r} (units: {', '.join(units)})")
    return float(match[1]) * units[match[2] or plain]


def format_bytes(size_bytes: int | float) -> str:
    """Return the shortest text that parses back to exactly `size_bytes`: `512MiB`, `1.5GiB`, `100B`."""
    size = int(size_bytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _BYTES[unit]
        if size >= scale and (size * 1000) % scale == 0:
            return f"{size / scale:g}{unit}" if parse_bytes(f"{size / scale:g}{unit}") == size else f"{size}B"
    return f"{size}B"


def human_bytes(size_bytes: int | float) -> str:
    """Return a size rounded for people to read: `8.79GiB`. It does not parse back exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = size_bytes / _BYTES[unit]
        if abs(size) >= 1:
            return f"{size:.0f}{unit}" if abs(size) >= 100 else f"{size:.3g}{unit}"
    return f"{size_bytes:.0f}B"


def format_ns(time_ns: float) -> str:
    """Return the shortest text that parses back to exactly `time_ns`, in microseconds where that is exact."""
    text = f"{time_ns / 1e3:g}us"
    return text if time_ns >= 1e3 and parse_ns(text) == time_ns else f"{time_ns!r}ns".replace(".0ns", "ns")
