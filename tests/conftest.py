"""What all tests share."""

from __future__ import annotations

import os

import pytest
import torch

# A test is about the compiler, not about what an earlier run of it left; tests/warm switches this on.
os.environ.setdefault("OVERLAPC_WARM_START", "0")
# Nor about how fast and how busy this machine is, which takes ten seconds to measure for each new cache folder.
if not torch.cuda.is_available():
    os.environ.setdefault("OVERLAPC_PROFILE", "cpu-gloo")


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing that was compiled before is found."""
    torch._dynamo.reset()
