"""Times for people to read."""

from __future__ import annotations


def us(time_ns: float) -> str:
    """Microseconds to read: one decimal below 100."""
    value = time_ns / 1e3
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def change(before_ns: float, after_ns: float) -> str:
    """A time before and after the passes."""
    return f"{us(before_ns)} -> {us(after_ns)}"


def ms(time_ns: float) -> str:
    """Milliseconds to read."""
    return f"{time_ns / 1e6:.3f} ms"
