"""Extracts the code of docs/TRAINERS.md for the tests of each trainer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TRAINERS.md"


def recipe(heading: str) -> dict[str, Any]:
    """Run the code under `## heading` and return the names that it defines."""
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    (code,) = re.findall(r"^```python\n(.*?)^```", sections[heading], re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), namespace)
    return namespace


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of the losses of two runs, which must have equally many."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def needs(package: str) -> pytest.MarkDecorator:
    """Skip if `package` is not installed; does not import it, which takes seconds (ranks import it)."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
