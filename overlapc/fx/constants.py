"""Comparison of constants in graphs and in the objects that they were traced from."""

from __future__ import annotations

from typing import Any


def exactly(value: Any) -> Any:
    """Return what equals only for values that a program cannot tell apart: not for 2 and 2.0, nor for 0.0 and -0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    if isinstance(value, tuple | list):
        return type(value), *map(exactly, value)
    if isinstance(value, dict):
        return type(value), *((exactly(key), exactly(held)) for key, held in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(exactly, value))
    return type(value), value
