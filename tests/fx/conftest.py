"""A fake process group on which graphs with collectives are traced: rank 0 of 4, without communication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds import fake_world


@pytest.fixture(scope="module")
def world() -> Iterator[str]:
    with fake_world(4) as group:
        yield group
