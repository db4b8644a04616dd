"""Fixtures of the tests of generated code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codegen.cpp_kernels import Kernels
from tests.codegen.interpreted import interpreting


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Compile BODIES of the test's file in C++, in one call."""
    return Kernels(request.module.BODIES, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Run Triton kernels that the test loads in Triton's interpreter."""
    with interpreting():
        yield
