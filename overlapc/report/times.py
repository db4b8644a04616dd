"""Formats times as text."""

from __future__ import annotations


def us(time_ns: float) -> str:
    """Return a time in microseconds without the unit, with one decimal below 100."""
    value = time_ns / 1e3
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def change(before_ns: float, after_ns: float) -> str:
    """Return `before -> after` in microseconds without the unit."""
    return f"{us(before_ns)} -> {us(after_ns)}"


def ms(time_ns: float) -> str:
    """Return a time in milliseconds with three decimals and the unit."""
    return f"{time_ns / 1e6:.3f} ms"
