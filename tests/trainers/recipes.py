"""The code of docs/TRAINERS.md, as the tests of each trainer run it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TRAINERS.md"


def recipe(heading: str) -> dict[str, Any]:
    """What the code under `## heading` defines."""
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    (code,) = re.findall(r"^```python\n(.*?)^```", sections[heading], re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), namespace)
    return namespace


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two runs' losses, of which there are as many."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where it is not installed, without importing it here: ranks do, and it takes seconds."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
