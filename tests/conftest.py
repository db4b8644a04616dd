"""What all tests share."""

from __future__ import annotations

import os

# A test is about the compiler, not about what an earlier run of it left; tests/warm switches this on.
os.environ.setdefault("OVERLAPC_WARM_START", "0")
