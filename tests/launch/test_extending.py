"""The Python examples in docs/EXTENDING.md run and do what the page says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from overlapc.report import report_of_process
from overlapc.runtime.counters import counted
from tests import ROOT

TEXT = (ROOT / "docs" / "EXTENDING.md").read_text()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the document's Python blocks in order and return the names that they define."""
    made: dict[str, Any] = {}
    for match in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        line = TEXT.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], "docs/EXTENDING.md", "exec"), made)
    return made


def test_the_documented_pass_runs_by_name(names):
    torch._dynamo.reset()
    x = torch.ones(2, 4)
    torch.compile(torch.sin, backend="overlapc", options=names["by_name"])(x)
    passes = [row.name for row in report_of_process().steps[0].graphs[-1].passes]
    assert passes == ["bucket", "lazy_waits"]


def test_the_documented_op_is_lowered_and_fused(names):
    torch._dynamo.reset()
    before = counted("kernels"), counted("fallbacks")
    torch.testing.assert_close(names["compiled"](torch.ones(5)), torch.full((5,), 2.0).sin())
    assert (counted("kernels") - before[0], counted("fallbacks") - before[1]) == (1, 0)
