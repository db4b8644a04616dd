"""A fixture with which sharded models are traced on a fake process group, as rank 1 of 4, without communication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds import fake_world


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with fake_world(4, rank=1):
        yield
