"""How sizes in bytes are printed."""

from __future__ import annotations

import pytest

from overlapc.units import human_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1.5 * MIB, "1.5MiB"),
        (8.788 * 1024 * MIB, "8.79GiB"),
        (99.96 * MIB, "100MiB"),
        (1000 * MIB, "1000MiB"),
        (-416 * MIB, "-416MiB"),
        (3000 * 1024 * 1024 * MIB, "3000TiB"),
    ],
)
def test_sizes_are_rounded_to_three_digits_or_whole_units(size_bytes, text):
    assert human_bytes(size_bytes) == text
